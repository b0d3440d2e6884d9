"""An engine's rank that owns its device pages and lends them to a `HostCache`.

The class has the interface of `Cache`, so that tests run the same programs with both. Ranks use
different page numbers, and the engine overwrites freed pages, so that a test detects a wrong or late
copy. A finished request keeps its device pages while its backup waits for host pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.validated_settings import part_of
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.executor.pools import DevicePool
from lockstep.ranks.group.host_cache import HostCache, PagesByPool
from lockstep.ranks.group.member.group_rank import Flushed
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.protocol.agreed_pools import shard_layouts
from lockstep.ranks.protocol.answers import Admission, Wait
from lockstep.ranks.protocol.config import CacheConfig, HostCacheConfig, RankCacheConfig, Recurrent
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.ranks.replica.operations.lent import NO_PAGE
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.tokens import Tokens

Table = dict[str, list[int]]


@dataclass
class Allocated:
    """The device tensors of one engine rank, with a free list for each pool."""

    pools: Mapping[str, DevicePool]
    free: Table

    @classmethod
    def of(cls, config: CacheConfig, rank: int, ranks: int) -> "Allocated":
        """Allocate as many device pages as `config` has."""
        counts = {each.pool: each.device_pages for each in config.components}
        counts[KV_POOL] = config.device_pages
        shards = shard_layouts(config, rank, ranks)
        pools = {
            name: DevicePool(shard, counts[name], torch.device("cpu"))
            for name, shard in shards.items()
        }
        order = 1 if rank % 2 else -1
        return cls(pools, {name: list(range(count))[::order] for name, count in counts.items()})

    def lent(self) -> dict[str, EnginePages]:
        """Return the device tensors as the `EnginePages` that `HostCache` takes."""
        return {
            name: EnginePages(
                pool.layout,
                {
                    each.column.name: list(pool.column(each.column.name))
                    for each in pool.layout.columns
                },
            )
            for name, pool in self.pools.items()
        }

    def give_back(self, table: Table) -> None:
        """Free device pages and overwrite their content."""
        for name, pages in table.items():
            mine = [page for page in pages if page != NO_PAGE]
            for each in self.pools[name].layout.columns:
                self.pools[name].column(each.column.name)[:, mine] = 77
            self.free[name] += mine


class LendingEngine(HostCache):
    """One rank of the engine, together with its `HostCache`."""

    _device: Allocated
    _tables: dict[str, Table]
    _leaving: dict[str, Table]
    _waiting: dict[str, list[tuple[Tokens, PagesByPool]]]
    """For each request: the tokens and device pages of its backups, oldest first. A backup that finds
    no free host pages has not started yet."""
    _ended: set[str]
    """Finished requests whose backups still wait for host pages."""
    keeps_states = False
    """Whether `insert` also lends the recurrent state. Only a test whose requests do not change the
    lent state may set this."""

    @classmethod
    def start(cls, config: CacheConfig, member: Collective) -> "LendingEngine":
        """Open a rank with as many device pages as `config` gives a `Cache`."""
        device = Allocated.of(config, member.rank, member.world_size)
        none = tuple(structs.replace(each, device_pages=0) for each in config.components)
        shared: dict[str, Any] = part_of(config, RankCacheConfig) | {"components": none}
        made = cls.open(HostCacheConfig(**shared), device.lent(), member)
        assert isinstance(made, LendingEngine)
        made._device, made._tables, made._leaving = device, {}, {}
        made._waiting, made._ended = {}, set()
        return made

    @property
    def device_pools(self) -> Mapping[str, DevicePool]:
        return self._device.pools

    def page_table(self, request: str, pool: str = KV_POOL) -> npt.NDArray[np.int32]:
        return np.array(self._tables[request][pool], dtype=np.int32)

    def load_back(
        self, request: str, tokens: Tokens, namespace: str = "", *, reserve_tokens: int = 0
    ) -> Admission | Wait:
        """Allocate device pages for a request, load its cached tokens, and admit it."""
        found = self.match_host(request, tokens, namespace)
        self._allocate(request, found, max(found, reserve_tokens))
        if found:
            self.load(request, tokens[:found], self._lends(request, found))
        self.admit(request, tokens, namespace, device_tokens=found)
        return Admission(0, found, 0, None)

    def insert(self, request: str, tokens: Tokens, *, final: bool = True) -> int:
        """Back up a request's full pages, and its recurrent state if `keeps_states` is True."""
        del final
        lent = self._lends(request, len(tokens) - len(tokens) % self.config.layout.page_tokens)
        if not self.keeps_states:
            states = [each.pool for each in self.config.components if isinstance(each, Recurrent)]
            lent |= dict.fromkeys(states, ())
        if not self.waits_for_host_pages(request):
            self._waiting[request] = []
        self._waiting[request].append((tokens, lent))
        return self.back_up(request, tokens, lent)

    def retract(
        self, request: str, tokens: Tokens, device_pages: "PagesByPool | None" = None
    ) -> bool:
        lent = self._lends(request, len(tokens)) if device_pages is None else device_pages
        return super().retract(request, tokens, lent)

    def release(self, request: str) -> bool:
        """Release a request; return True if its device pages were freed.

        The pages stay allocated while a copy uses them or a backup of the request waits for host pages.
        """
        if self.waits_for_host_pages(request):
            self._ended.add(request)
            return False
        self._waiting.pop(request, None)
        freed, table = super().release(request), self._tables.pop(request, {})
        if freed:
            self._device.give_back(table)
        else:
            self._leaving[request] = table
        return freed

    def abort(self, request: str) -> None:
        self.release(request)

    def step(self, *, idle_s: float = 0.0) -> None:
        """Retry waiting backups, step, and free device pages that finished requests no longer need."""
        for request in filter(self.backup_is_due, list(self._waiting)):
            self._back_up_again(request)
        for request in [each for each in self._ended if not self.waits_for_host_pages(each)]:
            self._ended.remove(request)
            self.release(request)
        self.begin_loads()
        self.begin_backups()
        super().step(idle_s=idle_s)
        for request in self.collect_freed():
            self._device.give_back(self._leaving.pop(request))
        for request in list(self._tables):
            if self.load_state(request) is LoadState.SAVED:
                self._device.give_back(self._tables.pop(request))

    def _back_up_again(self, request: str) -> None:
        waiting = self._waiting[request]
        while waiting:
            self.back_up(request, *waiting[0])
            if self.waits_for_host_pages(request):
                return
            waiting.pop(0)

    def flush(self) -> Flushed:
        """Flush the cache; flush again while the last flush has made room for a waiting backup."""
        flushed = super().flush()
        while any(map(self.backup_is_due, self._waiting)):
            flushed = super().flush()
        return flushed

    def _allocate(self, request: str, cached: int, total: int) -> None:
        unit = self.config.layout.page_tokens
        first, count = self.needed_from(cached), -(-total // unit)
        states = [each.pool for each in self.config.components if isinstance(each, Recurrent)]
        self._tables[request] = {
            pool: self._take(pool, 0, 1)
            if pool in states
            else self._take(pool, first[pool] // unit, count)
            for pool in first
        }

    def _take(self, pool: str, gone: int, count: int) -> list[int]:
        return [NO_PAGE] * gone + [self._device.free[pool].pop() for _ in range(count - gone)]

    def _lends(self, request: str, tokens: int) -> dict[str, Sequence[int]]:
        """Return the device pages of a request's first `tokens` tokens."""
        pages = -(-tokens // self.config.layout.page_tokens)
        return {pool: table[:pages] for pool, table in self._tables[request].items()}


def lending(cache: RankCache) -> LendingEngine:
    """Check that a rank's cache is a `LendingEngine`; return the cache with that type."""
    assert isinstance(cache, LendingEngine)
    return cache
