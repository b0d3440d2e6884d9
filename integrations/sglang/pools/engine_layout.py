"""SGLang's device pools as Lockstep pages: the page layouts, and the tensors that hold the pages.

SGLang stores keys and values as [tokens, heads, elements] per layer; the slots of a page are
consecutive. On the host and in storage a page is heads-first, so that ranks of any TP size can find
their heads. Latent attention (MLA) is replicated on every rank. The index of sparse attention is also
replicated, and is a column of the same page.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ....errors import ConfigError
from ....page_format.page_layout import Column, PageLayout
from ....ranks.executor.engine_pages import AxisOrder, EnginePages, dtype_name
from ....ranks.protocol.orders import KV_POOL
from ...kv_description import KEYS, VALUES
from ..engine.contract import LatentBuffers, MhaBuffers
from .slots import WINDOW_POOL
from .state_layout import state_columns
from .state_slots import STATE_POOL

LATENT, INDEX = "latent", "index"


@dataclass(frozen=True, slots=True, eq=False)
class SglangPool:
    """One of SGLang's device pools: the layout of its pages, and this rank's tensors that hold them."""

    layout: PageLayout
    tensors: Mapping[str, Sequence[torch.Tensor]]
    """Maps a column's name to its tensors, one per layer. `order` is the order of the axes of each
    tensor."""
    order: AxisOrder

    @property
    def device_pages(self) -> int:
        """Number of device pages, including the dummy page in which SGLang stores no KV."""
        return len(next(iter(self.tensors.values()))[0])

    def lend(self, rank: int, world_size: int) -> EnginePages:
        """Return the tensors as engine-owned device pages (lent), for copies to and from the host."""
        return EnginePages(self.layout.shard(rank, world_size), self.tensors, self.order)


def engine_pools(kv_cache: Any, page_tokens: int, tp_size: int) -> dict[str, SglangPool]:
    """Describe SGLang's KV pool and, if the model has them, its window pool and its state pool.

    Raises `ConfigError` with the pool's class if Lockstep does not support it.
    """
    kind = type(kv_cache).__name__
    describe = _KINDS.get(kind)
    if describe is None:
        raise ConfigError(
            f"the model's KV is in a {kind}; Lockstep supports {', '.join(_KINDS)}; run without"
            " --radix-cache-backend"
        )
    return describe(kv_cache, page_tokens, tp_size)


def _attention(pool: Any, page_tokens: int, tp_size: int) -> dict[str, SglangPool]:
    [info] = pool.get_device_pool_infos()
    return {KV_POOL: _pool(info.buffer_info, type(pool).__name__, page_tokens, tp_size)}


def _windows(pool: Any, page_tokens: int, tp_size: int) -> dict[str, SglangPool]:
    parts = ((KV_POOL, pool.full_kv_pool), (WINDOW_POOL, pool.swa_kv_pool))
    for _, part in parts:
        if type(part).__name__ != "MHATokenToKVPool" or not part.layer_num:
            raise ConfigError(
                f"the windowed model has a {type(part).__name__} of {part.layer_num} layers;"
                " Lockstep supports MHATokenToKVPool with one layer or more; run without"
                " --radix-cache-backend"
            )
    return {name: _attention(part, page_tokens, tp_size)[KV_POOL] for name, part in parts}


def _states(pool: Any, page_tokens: int, tp_size: int) -> dict[str, SglangPool]:
    """Describe a hybrid model: some layers have attention, the others a recurrent state."""
    attending = engine_pools(pool.full_kv_pool, page_tokens, tp_size)
    columns = state_columns(pool.mamba_pool, tp_size)
    return {**attending, STATE_POOL: _described(columns, 1, AxisOrder.HEADS_FIRST)}


def _pool(info: MhaBuffers, kind: str, page_tokens: int, tp_size: int) -> SglangPool:
    layout = str(info.buffers.layout.value)
    order = _ORDERS.get(layout)
    if order is None or info.scales is not None or info.page_size != page_tokens:
        raise ConfigError(
            f"the model's {kind} has layout {layout!r},"
            f" {'no scales' if info.scales is None else 'separate scales'} and pages of"
            f" {info.page_size} tokens; Lockstep supports {' and '.join(_ORDERS)} without scales, with"
            f" pages of {page_tokens}"
        )
    sides = ((KEYS, info.buffers.k, info.head_dim), (VALUES, info.buffers.v, info.v_head_dim))
    columns = dict[Column, Sequence[torch.Tensor]]()
    for name, buffers, elements in sides:
        column = Column(
            name=name,
            layers=len(buffers),
            # With more ranks than KV heads, several ranks hold the same head; count each copy as a
            # separate head.
            heads=info.head_num * tp_size,
            elements=elements,
            dtype=dtype_name(info.dtype),
        )
        columns[column] = [_paged(each, page_tokens, order) for each in buffers]
    return _described(columns, page_tokens, order)


def _latent(pool: Any, page_tokens: int, tp_size: int) -> dict[str, SglangPool]:
    """Describe the latent-attention pool of a model; every rank has the whole latent KV."""
    del tp_size
    [info] = pool.get_device_pool_infos()
    column, tensors = _rows(info.buffer_info, type(pool).__name__, page_tokens)
    return {KV_POOL: _described({column: tensors}, page_tokens, AxisOrder.TOKENS_FIRST)}


def _sparse(pool: Any, page_tokens: int, tp_size: int) -> dict[str, SglangPool]:
    """Describe the pool of latent attention with an index for sparse attention (keys and scales)."""
    latent = _latent(pool, page_tokens, tp_size)[KV_POOL]
    if pool.index_kpool != 1 or pool.index_page_size != page_tokens:
        raise ConfigError(
            f"the model's {type(pool).__name__} keeps one index key for {pool.index_kpool} tokens, and"
            f" {pool.index_page_size} to a page of {page_tokens} tokens; Lockstep supports one for each"
            " token; run without --radix-cache-backend"
        )
    # Leave out layers without an index; they use the tokens that another layer's index selects.
    layers = [each for each in pool.index_k_with_scale_buffer if len(each)]
    if not layers:
        return {KV_POOL: latent}
    row = layers[0].shape[1]
    # A row of this column does not belong to one token, because a page holds all keys and then all
    # scales. This is harmless, because pages are copied whole.
    column = Column(
        name=INDEX,
        layers=len(layers),
        heads=1,
        elements=row // page_tokens,
        dtype=dtype_name(layers[0].dtype),
        replicated=True,
    )
    paged = [each.view(len(each), page_tokens, 1, row // page_tokens) for each in layers]
    [of_latent] = latent.layout.columns
    columns = {of_latent: latent.tensors[LATENT], column: paged}
    return {KV_POOL: _described(columns, page_tokens, AxisOrder.TOKENS_FIRST)}


def _rows(
    info: LatentBuffers, kind: str, page_tokens: int
) -> tuple[Column, Sequence[torch.Tensor]]:
    whole = isinstance(info.buffers, tuple)
    if not whole or info.scales is not None or info.page_size != page_tokens:
        raise ConfigError(
            f"the model's {kind} has {'one tensor' if whole else 'several tensors'}"
            f" for each layer, {'no scales' if info.scales is None else 'separate scales'} and"
            f" pages of {info.page_size} tokens; Lockstep supports one tensor without scales, with"
            f" pages of {page_tokens}"
        )
    layers = cast("tuple[torch.Tensor, ...]", info.buffers)
    if len(layers) != info.device_layer_num:
        raise ConfigError(
            f"the model's {kind} has {len(layers)} of {info.device_layer_num} layers on this rank;"
            " Lockstep supports only ranks with all layers; run without --radix-cache-backend"
        )
    column = Column(
        name=LATENT,
        layers=len(layers),
        heads=1,
        elements=info.kv_cache_dim,
        dtype=dtype_name(info.dtype),
        replicated=True,
    )
    return column, [_paged(each, page_tokens, AxisOrder.TOKENS_FIRST) for each in layers]


def _described(
    columns: Mapping[Column, Sequence[torch.Tensor]], page_tokens: int, order: AxisOrder
) -> SglangPool:
    return SglangPool(
        PageLayout(page_tokens=page_tokens, columns=tuple(columns)),
        {column.name: tensors for column, tensors in columns.items()},
        order,
    )


def _paged(tensor: torch.Tensor, page_tokens: int, order: AxisOrder) -> torch.Tensor:
    """Return one layer's tensor with a page axis as its first axis."""
    if order is AxisOrder.HEADS_FIRST:
        return tensor
    # Use `view`, which needs no copy whatever the strides, because a page's slots are consecutive.
    return tensor.view(len(tensor) // page_tokens, page_tokens, *tensor.shape[1:])


_ORDERS = {"nhd": AxisOrder.TOKENS_FIRST, "hnd": AxisOrder.HEADS_FIRST}

_KINDS: Mapping[str, Callable[[Any, int, int], dict[str, SglangPool]]] = {
    "MHATokenToKVPool": _attention,
    "SWAKVPool": _windows,
    "MLATokenToKVPool": _latent,
    "DSATokenToKVPool": _sparse,
    "HybridLinearKVPool": _states,
}
"""Supported pool classes of SGLang, by class name. Subclasses are unsupported, because their layouts
differ."""
