"""The per-token KV of a Transformers model's layers as pages, and checks for unsupported models.

The shape of each layer's KV is taken from a forward pass of one token, not from the configuration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...errors import ConfigError
from ...page_format.page_layout import Column, PageLayout
from ...ranks.executor.engine_pages import EnginePages, dtype_name
from ...ranks.protocol.config import SlidingWindow
from ...ranks.protocol.orders import KV_POOL
from .past import PagedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
"""Kinds of rotary positions with which later tokens never change the KV of an earlier token. A model
with another kind cannot be cached."""


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """One layer's attention window, and its KV of one token on this rank, as a sample of the shape."""

    window: int | None
    """Attention window of the layer in tokens; None for full attention."""
    divided: bool
    """Whether the ranks divide the layer's heads among them. If not, each rank has all heads."""
    keys: torch.Tensor
    """This layer's keys of one token, [1, heads, 1, elements]."""
    values: torch.Tensor


class SequencePages:
    """Preallocated device memory for the KV of one sequence, divided into layers, pools and pages."""

    def __init__(self, layers: Sequence[KeptLayer], ranks: int, pages: int, tokens: int) -> None:
        """Allocate `pages` pages of `tokens` tokens for each layer; `ranks` ranks divide the heads."""
        self._layers = layers
        self._page_tokens = tokens
        self._memory = [
            (_memory(each.keys, pages * tokens), _memory(each.values, pages * tokens))
            for each in layers
        ]
        by_pool: dict[str, list[int]] = {}
        has_full = any(each.window is None for each in layers)
        for at, each in enumerate(layers):
            # Put window layers into the full-attention pool if the model has no other layers, because a
            # cache needs this pool. All tokens of these layers are then kept.
            pool = f"window-{each.window}" if each.window and has_full else KV_POOL
            by_pool.setdefault(pool, []).append(at)
        self._by_pool = by_pool
        self.layouts = {pool: self._layout(pool, ranks) for pool in by_pool}
        shards = {pool: layout.shard(0, ranks) for pool, layout in self.layouts.items()}
        windows = [
            self._layers[at[0]].window or 0 for pool, at in by_pool.items() if pool != KV_POOL
        ]
        self.narrowest = max(tokens, min(windows) // tokens * tokens) if windows else None
        """Window size, in tokens, of the pool with the shortest window, rounded down to whole pages;
        None without a window pool."""
        self.kept_whole = "" if all(each.divided for each in layers) else ", whole on every rank"
        """Text that is added to page keys if each rank has all heads of some layer; otherwise empty.

        Such pages have another layout than pages of layers whose heads the ranks divide.
        """
        self.page_bytes = sum(each.page_bytes for each in shards.values())
        """Bytes of one page on this rank, summed over all pools."""
        self.lent = {
            pool: EnginePages(shard, {"k": self._views(pool, 0), "v": self._views(pool, 1)})
            for pool, shard in shards.items()
        }

    def components(self, host_pages: int) -> tuple[SlidingWindow, ...]:
        """Return the component configurations of the sliding-window pools."""
        return tuple(
            SlidingWindow(
                window_tokens=self._layers[at[0]].window or 0,
                layout=self.layouts[pool],
                host_pages=host_pages,
                pool=pool,
            )
            for pool, at in self._by_pool.items()
            if pool != KV_POOL
        )

    def layers(self) -> list[PagedLayer]:
        """Return empty layers for a new sequence; its KV goes into the preallocated memory."""
        return [
            PagedLayer(*memory, each.window)
            for memory, each in zip(self._memory, self._layers, strict=True)
        ]

    def _layout(self, pool: str, ranks: int) -> PageLayout:
        kept = [self._layers[at] for at in self._by_pool[pool]]
        divided = [each.divided for each in kept]
        columns: list[Column] = []
        for name, tensors in (
            ("k", [each.keys for each in kept]),
            ("v", [each.values for each in kept]),
        ):
            shapes = {(each.shape[1], each.shape[3], each.dtype) for each in tensors}
            if len(shapes) != 1 or len(set(divided)) != 1:
                raise ConfigError(
                    f"layers of pool {pool!r} have {name} of several shapes or dtypes, or only some of"
                    f" them are divided: {', '.join(sorted(map(str, shapes)))}; run the model without"
                    " the cache"
                )
            heads, elements, dtype = shapes.pop()
            columns.append(
                Column(
                    name=name,
                    layers=len(tensors),
                    heads=heads * ranks if divided[0] else heads,
                    elements=elements,
                    dtype=dtype_name(dtype),
                    replicated=not divided[0],
                )
            )
        return PageLayout(page_tokens=self._page_tokens, columns=tuple(columns))

    def _views(self, pool: str, which: int) -> list[torch.Tensor]:
        """Return views [pages, heads, tokens, elements], one per layer of a pool.

        `which` is 0 for the keys and 1 for the values.
        """
        return [_paged(self._memory[at][which], self._page_tokens) for at in self._by_pool[pool]]


def kept_layers(model: "PreTrainedModel", ranks: int) -> list[KeptLayer]:
    """Compute one token to learn the KV shape of each layer; a collective call of all ranks.

    Raises `ConfigError` with the reason for an unsupported model.
    """
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError("the model has an encoder, whose outputs depend on more than the prefix")
    _require_steady_positions(config)
    past = DynamicCache(config=config)
    for at, layer in enumerate(past.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"layer {at} of the model keeps its state in a {type(layer).__name__}, but the cache"
                " supports full attention and sliding windows; run the model without the cache"
            )
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, past_key_values=past, use_cache=True)
    kept: list[KeptLayer] = []
    for at, layer in enumerate(past.layers):
        if layer.keys is None or layer.values is None:
            raise ConfigError(f"layer {at} of the model stored no KV for a token")
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        divided = _is_divided(config, at, layer.keys.shape[1], ranks)
        kept.append(KeptLayer(window, divided, layer.keys, layer.values))
    if len({each.keys.device for each in kept}) != 1:
        raise ConfigError("the model's layers are on several devices; place a rank's layers on one")
    return kept


def _memory(token: torch.Tensor, tokens: int) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.zeros(
            (1, token.shape[1], tokens, token.shape[3]), dtype=token.dtype, device=token.device
        )


def _paged(memory: torch.Tensor, tokens: int) -> torch.Tensor:
    """View memory [1, heads, tokens, elements] of one sequence as [pages, heads, tokens, elements]."""
    _, heads, length, elements = memory.shape
    return memory.view(heads, length // tokens, tokens, elements).transpose(0, 1)


def _require_steady_positions(config: "PreTrainedConfig") -> None:
    for name in ("rope_parameters", "rope_scaling"):
        given = cast("Mapping[str, Any]", getattr(config, name, None) or {})
        # Check each kind of layer, because each may have separate rope parameters in the configuration.
        by_layer: list[Mapping[str, Any]] = [
            each for each in given.values() if isinstance(each, Mapping)
        ]
        for each in by_layer or [given]:
            kind = each.get("rope_type", each.get("type", "default"))
            if kind not in ROPES:
                raise ConfigError(
                    f"the model's rope_type is {kind!r}: a token's keys depend on the number of later"
                    " tokens, so a prefix cannot be reused; run the model without the cache"
                )


def _is_divided(config: "PreTrainedConfig", at: int, heads: int, ranks: int) -> bool:
    """Return whether the ranks divide a layer's KV heads; this rank has `heads` of them.

    If not, each rank has all heads. Raises `ConfigError` if the configuration does not say which.
    """
    if ranks == 1:
        return True
    fields = vars(config)
    for end in ("key_value_heads", "attention_heads"):
        known = {value for name, value in fields.items() if name.endswith(end)}
        divided, whole = heads * ranks in known, heads in known
        if divided != whole:
            return divided
    raise ConfigError(
        f"layer {at} keeps {heads} KV heads on each of {ranks} ranks, and the configuration does not"
        " say whether the model has more; run the model without the cache"
    )
