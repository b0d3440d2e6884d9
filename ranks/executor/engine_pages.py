"""Device pages that belong to an engine: its own KV tensors, seen as pages."""

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate
from math import prod
from operator import mul

import torch

from ...errors import ConfigError
from ...page_format.page_layout import DTYPE_BYTES, ColumnShard, ShardLayout


class AxisOrder(Enum):
    """How an engine's tensors name the axes of a page; copies turn them to the page's own order."""

    HEADS_FIRST = "[pages, heads, tokens, elements]"
    TOKENS_FIRST = "[pages, tokens, heads, elements]"


class EnginePages:
    """An engine's tensors for one pool as device pages; see `DevicePages`. Nothing is copied or owned.

    For each column one tensor for each layer, in layer order, with the axes that `order` names. Heads
    first, tokens and elements may be several axes each, the outermost first. Strides may be any; copies
    are fastest where all of a page of one layer is contiguous, heads first. Raises `ConfigError` for a
    tensor that the layout does not describe.
    """

    lent = True

    def __init__(
        self,
        layout: ShardLayout,
        tensors: Mapping[str, Sequence[torch.Tensor]],
        order: AxisOrder = AxisOrder.HEADS_FIRST,
    ) -> None:
        self._described = _described(layout)
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
            rows = shard.heads * layout.page_tokens
            page = (shard.heads, layout.page_tokens, shard.nbytes // (shard.layers * rows))
            self._layers[name] = [
                _page_bytes(f"KV tensor {at} of column {name!r}", tensor, order, page)
                for at, tensor in enumerate(layers)
            ]

    def require_fits(self, pool: str, layout: ShardLayout) -> None:
        """Raise `ConfigError` unless the tensors were described as those of such a pool."""
        if self._described != _described(layout):
            raise ConfigError(
                f"the pages that the engine lends for pool {pool!r} are not of its layout: they have"
                f" {self._described}, and the pool {_described(layout)}"
            )

    def slabs(self, shard: ColumnShard) -> list[torch.Tensor]:
        """Return one view of all layers if they lie evenly, or else of each; see `DevicePages`."""
        layers = self._layers[shard.column.name]
        evenly = _evenly(layers)
        return [layer.unsqueeze(0) for layer in layers] if evenly is None else [evenly]


def _described(layout: ShardLayout) -> str:
    """Say what a page holds on any rank."""
    columns = [
        f"{each.layers} layers of {each.heads} heads of column {each.column.name!r} with"
        f" {each.column.elements} elements of {each.column.dtype}"
        for each in layout.columns
    ]
    return f"{layout.page_tokens} tokens in {', '.join(columns)}"


def _page_bytes(
    what: str, tensor: torch.Tensor, order: AxisOrder, page: tuple[int, int, int]
) -> torch.Tensor:
    """Return one layer's KV tensor as a view [pages, heads, tokens, bytes], heads first."""
    turned = tensor.ndim == 4 and order is AxisOrder.TOKENS_FIRST
    with torch.inference_mode(mode=False):
        seen = tensor.detach().transpose(1, 2) if turned else tensor.detach()
        if seen.stride(-1) != 1:
            # The bytes of an element are contiguous at least.
            seen = seen.unsqueeze(-1)
        heads, tokens, nbytes = page
        axes = seen.shape[2:]
        if (
            tensor.ndim < 4
            or seen.shape[1] != heads
            or prod(axes) * seen.element_size() != tokens * nbytes
            or tokens not in accumulate(axes, mul)
        ):
            raise ConfigError(
                f"{what} is {list(tensor.shape)} of {dtype_name(tensor.dtype)}, which is to be"
                f" {order.value}, and a page of the layout has {heads} heads, {tokens} tokens and"
                f" {nbytes} bytes of elements"
            )
        if _overlaps(seen):
            raise ConfigError(f"{what} has strides {tensor.stride()}: its pages overlap in memory")
        return seen.view(torch.uint8)


def _evenly(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return layers that follow each other at one distance as one view [layers, ...], if they do.

    One view takes one call to copy, whatever the number of layers.
    """
    first, *others = layers
    begins = [layer.storage_offset() for layer in layers]
    step = begins[1] - begins[0] if others else 1
    if step < 1 or any(
        each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or (each.shape, each.stride()) != (first.shape, first.stride())
        or begin != begins[0] + at * step
        for at, (each, begin) in enumerate(zip(layers, begins, strict=True))
    ):
        return None
    with torch.inference_mode(mode=False):
        return first.as_strided((len(layers), *first.shape), (step, *first.stride()))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Say whether elements may share memory: no axis may step within what smaller steps reach."""
    reached = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reached:
                return True
            reached += step * (size - 1)
    return False


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which columns know a torch type; raises `ConfigError` for other ones."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        raise ConfigError(f"KV of type {name} is not supported; known: {known}")
    return name
