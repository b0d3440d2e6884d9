"""SGLang's pools as pages of Lockstep: their layout, and the tensors that hold them.

SGLang keeps keys and values as [tokens, heads, elements] for each layer; the slots of a page follow
each other. On the host and in storage a page has its heads first, so ranks of any TP size find theirs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError
from ...page_format.page_layout import Column, PageLayout
from ...ranks.executor.engine_pages import AxisOrder, EnginePages, dtype_name
from ...ranks.orders import KV_POOL
from .contract import MhaBuffers
from .slots import WINDOW_POOL

KEYS, VALUES = "k", "v"


@dataclass(frozen=True, slots=True, eq=False)
class EnginePool:
    """One pool of the engine's: the layout of its pages, and what holds them on this rank."""

    layout: PageLayout
    tensors: Mapping[str, Sequence[torch.Tensor]]
    """By column, for each layer; see `AxisOrder`."""
    order: AxisOrder

    @property
    def device_pages(self) -> int:
        """How many pages there are, with the one that SGLang uses for nothing."""
        return len(self.tensors[KEYS][0])

    def lend(self, rank: int, world_size: int) -> EnginePages:
        """Return the tensors as pages that a cache copies to and from."""
        return EnginePages(self.layout.shard(rank, world_size), self.tensors, self.order)


def engine_pools(kv_cache: Any, page_tokens: int, tp_size: int) -> dict[str, EnginePool]:
    """Describe SGLang's pool of KV, or the two pools that it consists of.

    Raises `ConfigError`, which names the pool's class, for one that Lockstep does not serve.
    """
    kind = type(kv_cache).__name__
    describe = _KINDS.get(kind)
    if describe is None:
        raise ConfigError(
            f"the model's KV is in a {kind}, and Lockstep serves {', '.join(_KINDS)}; run without"
            " --radix-cache-backend"
        )
    return describe(kv_cache, page_tokens, tp_size)


def _attention(pool: Any, page_tokens: int, tp_size: int) -> dict[str, EnginePool]:
    [info] = pool.get_device_pool_infos()
    return {KV_POOL: _pool(info.buffer_info, type(pool).__name__, page_tokens, tp_size)}


def _windows(pool: Any, page_tokens: int, tp_size: int) -> dict[str, EnginePool]:
    parts = ((KV_POOL, pool.full_kv_pool), (WINDOW_POOL, pool.swa_kv_pool))
    for _, part in parts:
        if type(part).__name__ != "MHATokenToKVPool" or not part.layer_num:
            raise ConfigError(
                f"the model's windows are beside a {type(part).__name__} of {part.layer_num} layers,"
                " and Lockstep serves MHATokenToKVPool with one layer or more; run without"
                " --radix-cache-backend"
            )
    return {name: _attention(part, page_tokens, tp_size)[KV_POOL] for name, part in parts}


def _pool(info: MhaBuffers, kind: str, page_tokens: int, tp_size: int) -> EnginePool:
    layout = str(info.buffers.layout.value)
    order = _ORDERS.get(layout)
    if order is None or info.scales is not None or info.page_size != page_tokens:
        raise ConfigError(
            f"the model's {kind} has layout {layout!r},"
            f" {'no scales' if info.scales is None else 'scales beside its KV'} and pages of"
            f" {info.page_size} tokens; Lockstep serves {' and '.join(_ORDERS)} without scales, with"
            f" pages of {page_tokens}"
        )
    sides = ((KEYS, info.buffers.k, info.head_dim), (VALUES, info.buffers.v, info.v_head_dim))
    columns = tuple(
        Column(
            name=name,
            layers=len(buffers),
            # Where there are more ranks than KV heads, each rank's copy counts as a head of its own.
            heads=info.head_num * tp_size,
            elements=elements,
            dtype=dtype_name(info.dtype),
        )
        for name, buffers, elements in sides
    )
    return EnginePool(
        PageLayout(page_tokens=page_tokens, columns=columns),
        {name: [_paged(each, page_tokens, order) for each in found] for name, found, _ in sides},
        order,
    )


def _paged(tensor: torch.Tensor, page_tokens: int, order: AxisOrder) -> torch.Tensor:
    """Return one layer with an axis for its pages."""
    if order is AxisOrder.HEADS_FIRST:
        return tensor
    # A view, whatever the strides: the slots of a page follow each other.
    return tensor.view(len(tensor) // page_tokens, page_tokens, *tensor.shape[1:])


_ORDERS = {"nhd": AxisOrder.TOKENS_FIRST, "hnd": AxisOrder.HEADS_FIRST}
"""SGLang's names for the order of the axes."""

_KINDS: Mapping[str, Callable[[Any, int, int], dict[str, EnginePool]]] = {
    "MHATokenToKVPool": _attention,
    "SWAKVPool": _windows,
}
"""The classes of SGLang's pools. A class derived from one of them is another layout."""
