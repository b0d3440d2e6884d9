"""Ranks in threads of this process, each with a real `HostCache` and device tensors of an engine."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lockstep.coordinator.collective import Collective
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.group.member.group_rank import Listener
from lockstep.ranks.protocol.config import HostCacheConfig
from tests.kit.ranks.as_threads import RanksAsThreads

T = TypeVar("T")

PAGE_TOKENS = 4
DEVICE_PAGES = 16
HEADS = 2


def on_every_rank(
    program: Callable[[HostCache], T],
    ranks: int = 2,
    *,
    listener: Listener | None = None,
    **settings: Any,
) -> list[T]:
    """Run a program with each rank's `HostCache`; return the results in rank order.

    `settings` are passed to the caches. Only rank 0 gets the `listener`.
    """
    layout = PageLayout(
        page_tokens=PAGE_TOKENS,
        columns=(Column(name="k", layers=1, heads=HEADS, elements=2, dtype="float32"),),
    )
    config = HostCacheConfig(model="m", layout=layout, host_pages=DEVICE_PAGES, **settings)

    def run(member: Collective, hold: Callable[[], None]) -> T:
        tensor = torch.ones(DEVICE_PAGES, HEADS // ranks, PAGE_TOKENS, 2)
        pages = EnginePages(layout.shard(member.rank, ranks), {"k": [tensor]})
        host = HostCache.open(config, pages, member, listener=None if member.rank else listener)
        try:
            return program(host)
        finally:
            host.close(flush=False)

    return RanksAsThreads().run(run, ranks)
