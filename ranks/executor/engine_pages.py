"""Device pages that belong to an engine: its own KV tensors, seen as pages."""

from collections.abc import Mapping, Sequence

import torch

from ...errors import ConfigError
from ..page_layout import DTYPE_BYTES, ColumnShard, ShardLayout


class EnginePages:
    """The engine's KV tensors as device pages; see `DevicePages`. Nothing is copied or owned.

    For each column one tensor for each layer, in layer order: [pages, heads, page_tokens, elements],
    of any strides as long as one page of one layer is contiguous. Raises `ConfigError` for a tensor
    that the layout does not describe.
    """

    lent = True

    def __init__(self, layout: ShardLayout, tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._layers: dict[str, list[torch.Tensor]] = {}
        every = [tensor for layers in tensors.values() for tensor in layers]
        if not every:
            raise ConfigError("the engine has registered no KV tensor")
        self.device = every[0].device
        self.pages = min(len(tensor) for tensor in every)
        if not self.pages:
            raise ConfigError("the engine has no KV blocks; give its KV cache more memory")
        for shard in layout.columns:
            name, layers = shard.column.name, tensors[shard.column.name]
            if len(layers) != shard.layers:
                raise ConfigError(
                    f"column {name!r} has {shard.layers} layers, and the engine has"
                    f" {len(layers)} KV tensors for it"
                )
            page_layer_bytes = shard.nbytes // shard.layers
            self._layers[name] = [
                _page_bytes(f"KV tensor {at} of column {name!r}", tensor, page_layer_bytes)
                for at, tensor in enumerate(layers)
            ]

    def slabs(self, shard: ColumnShard) -> list[torch.Tensor]:
        """Return one view [1, pages, bytes] for each layer; uint8, no copy."""
        return [layer.unsqueeze(0) for layer in self._layers[shard.column.name]]


def _page_bytes(what: str, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return a view [pages, bytes] of one layer's KV tensor."""
    held = tensor[0].numel() * tensor.element_size()
    if held != nbytes:
        raise ConfigError(f"{what} has {held} bytes for each page, and the layout {nbytes}")
    if not tensor[0].is_contiguous():
        raise ConfigError(
            f"{what} is [pages, heads, tokens, elements] with strides {tensor.stride()}, and the"
            " bytes of one page must be contiguous, heads first; choose a layout of the KV cache"
            " that is"
        )
    if len(tensor) > 1 and tensor.stride(0) < tensor[0].numel():
        raise ConfigError(f"{what} has strides {tensor.stride()}: its pages overlap in memory")
    with torch.inference_mode(mode=False):
        flat = tensor.detach().flatten(1) if tensor.is_contiguous() else _strided(tensor)
        return flat.view(torch.uint8)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    size = (len(tensor), tensor[0].numel())
    return tensor.detach().as_strided(size, (tensor.stride(0), 1), tensor.storage_offset())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which columns know a torch type; raises `ConfigError` for other ones."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        raise ConfigError(f"KV of type {name} is not supported; known: {known}")
    return name
