"""HiCache's storage calls on a Lockstep store. Any failure counts as a miss and is logged.

SGLang calls the storage in threads of its own, and an exception would end such a thread. Therefore no
exception leaves this class after the store is open. Reads and writes return one flag per page. After a
read, the flag is True only if the page was read and verified. After a write, it is True only if the
store has confirmed that it has the page.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final

import torch

from ....errors import ConfigError
from ....page_format.object_name import ObjectName
from ....page_format.object_shape import ObjectShape
from ....storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ....storage_backends.error_log import LoggedError
from ...blocking_store import BlockingStore
from .contract import EngineFacts, HicacheHostPool, HicacheTransfer, StorageConfig
from .hicache_settings import parse
from .names import KV, PoolNames, pool_names
from .pages import PageBatch, PoolPages
from .prefixes import LookupResult, keys_to_query, restorable_prefixes

_CALLS_KEPT: Final = 4096
"""Maximum number of read records, and of write records, that are kept until SGLang collects metrics."""
_REMOVED_AT_A_TIME: Final = 1024
_WELL: Final = (ReadOutcome.OK.name, WriteOutcome.OK.name, WriteOutcome.PRESENT.name)
_AILING: Final = (ReadOutcome.FAILED.name, ReadOutcome.TIMED_OUT.name)
"""Page outcomes that this module logs. Stores log corrupt pages themselves, and missing pages are no
error."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovedPages:
    """Page count and bandwidth of one read or write call."""

    pages: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class _Pool:
    pages: PoolPages
    names: PoolNames
    shape: ObjectShape


class HiCacheCalls:
    """Reads and writes the pages of one rank's HiCache host pools in a Lockstep store. Thread-safe."""

    def __init__(self, config: StorageConfig, facts: EngineFacts) -> None:
        """Check the settings without opening a store; raise `ConfigError` for invalid ones."""
        self._config = config
        self._facts = facts
        self._settings = parse(config.extra_config or {})
        if config.dcp_size > 1 or config.tp_lcm_size:
            raise ConfigError(
                "Lockstep's storage under HiCache stores each rank's pages separately, so it supports"
                " neither decode context parallelism (DCP) nor tp_lcm_size; remove them"
            )
        self._store = BlockingStore(self._settings.store, "SGLang")
        self._pools: dict[str, _Pool] = {}
        verbs = ("looked up", "read", "written", "cleared")
        self._troubles = {verb: LoggedError(_log) for verb in verbs}
        self._lock = threading.Lock()
        self._read: deque[MovedPages] = deque(maxlen=_CALLS_KEPT)
        self._written: deque[MovedPages] = deque(maxlen=_CALLS_KEPT)

    def open(self, pool: HicacheHostPool) -> None:
        """Register the main pool and open the store; raise `ConfigError` if either fails."""
        self.add_pool(KV, pool)
        pages, names = self._pools[KV].pages, self._pools[KV].names
        self._store.open(pages.memory, self._settings.open_timeout_s)
        _log.info(
            "HiCache's pages go to the store %s: namespace %s, shard %s, %d bytes a page",
            self._store.shown,
            names.namespace[:16],
            names.shard,
            pages.page_bytes,
        )

    def add_pool(self, name: str, pool: HicacheHostPool) -> None:
        """Register another host pool; raise `ConfigError` if the pool's pages cannot be stored."""
        pages = PoolPages(name, pool)
        version = self._settings.weights_version
        names = pool_names(
            self._config,
            name,
            pool,
            weights_version=version,
            facts=self._facts,
            pieces=pages.pieces,
        )
        self._pools[name] = _Pool(pages, names, ObjectShape.whole(pages.page_bytes))

    def leading(self, keys: Sequence[str]) -> int:
        """Return how many of these main-pool pages the store has before the first missing one."""
        return self.find(keys, ()).pages

    def find(self, keys: Sequence[str], transfers: Sequence[HicacheTransfer]) -> LookupResult:
        """Return which prefixes of `keys` can be restored from the store.

        Each pool must have the pages that a prefix requires of it. `transfers` names the pools besides
        the main pool, each with its hit policy.
        """
        by = time.monotonic() + self._settings.exists_timeout_s
        there: set[ObjectName] = set()

        def has(pool: str, key: str) -> bool:
            return pool in self._pools and self._pools[pool].names.of([key])[0] in there

        try:
            queried_keys = keys_to_query(keys, transfers)
            names = [
                name
                for pool, of_pool in queried_keys.items()
                if pool in self._pools
                for name in self._pools[pool].names.of(of_pool)
            ]
            found = self._store.call(
                lambda backend: backend.exists(names, deadline=by), by, leaves=True
            )
            there.update(name for name, is_there in zip(names, found, strict=True) if is_there)
            result = restorable_prefixes(keys, transfers, has)
        except Exception as error:  # noqa: BLE001 - what cannot be told is missing.
            self._complain("looked up", repr(error))
            return LookupResult(0, {}, [])
        return result

    def read(self, pool: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Read pages into a pool; return one flag per page, True if the page was read and verified."""
        return self._move("read", pool, keys, indices)

    def write(self, pool: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Write pages of a pool; return one flag per page, True if the store now has the page."""
        return self._move("written", pool, keys, indices)

    def read_flat(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Read pages of the main pool into separate tensors, one per page."""
        return self._move_flat("read", keys, targets)

    def write_flat(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Write pages of the main pool from separate tensors, one per page."""
        return self._move_flat("written", keys, [page.contiguous() for page in pages])

    def clear(self) -> bool:
        """Remove this rank's pages of the current model and weights; return whether none remains.

        Other ranks remove their own pages. Pages of other models and weights are not removed.
        """
        by = time.monotonic() + self._settings.clear_timeout_s
        try:
            gone = self._store.call(partial(self._remove_ours, by=by), by, leaves=True)
        except Exception as error:  # noqa: BLE001 - the scheduler goes on with a store that is not empty.
            self._complain("cleared", repr(error))
            return False
        if not gone:
            self._complain("cleared", "some pages remain, or the deadline passed")
        return gone

    def take_moved(self) -> tuple[list[MovedPages], list[MovedPages]]:
        """Return (read calls, write calls) that moved pages since the last call of `take_moved`."""
        with self._lock:
            taken = list(self._read), list(self._written)
            self._read.clear()
            self._written.clear()
        return taken

    def close(self) -> None:
        """Close the store. Idempotent; later calls count as misses."""
        self._store.close()

    def _move(
        self, verb: str, name: str, keys: Sequence[str], indices: torch.Tensor | None
    ) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or indices is None or not pool.pages.fits(len(keys), indices):
            slots = 0 if indices is None else indices.numel()
            self._complain(verb, f"{len(keys)} keys and {slots} slots do not fit pool {name!r}")
            return [False] * len(keys)
        if not keys:
            return []
        is_read = verb == "read"
        return self._batches(verb, pool, keys, lambda: pool.pages.batches(indices, read=is_read))

    def _move_flat(
        self, verb: str, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> list[bool]:
        pool = self._pools.get(KV)
        if pool is None or len(tensors) != len(keys) or not all(map(pool.pages.takes, tensors)):
            self._complain(verb, f"{len(tensors)} tensors do not fit {len(keys)} pages")
            return [False] * len(keys)
        return self._batches(verb, pool, keys, lambda: [pool.pages.of_flat(tensors)])

    def _batches(
        self,
        verb: str,
        pool: _Pool,
        keys: Sequence[str],
        batches: Callable[[], Iterable[PageBatch]],
    ) -> list[bool]:
        """Read or write batches one after the other, within one deadline; return one flag per page."""
        went_well = [False] * len(keys)
        began = time.monotonic()
        limit = self._settings.read_timeout_s if verb == "read" else self._settings.write_timeout_s
        outcomes: list[IntEnum] = []
        try:
            for batch in batches():
                names = pool.names.of(keys[batch.first : batch.first + len(batch.buffers)])
                done = self._carry_out(verb, pool, names, batch, began + limit)
                for number, outcome in enumerate(done):
                    outcomes.append(outcome)
                    if outcome.name in _WELL:
                        batch.land(number)
                        went_well[batch.first + number] = True
        except Exception as error:  # noqa: BLE001 - SGLang's thread goes on, and computes what is missing.
            self._complain(verb, repr(error))
            return went_well
        self._note(verb, outcomes)
        self._remember(verb, sum(went_well), pool.pages.page_bytes, time.monotonic() - began)
        return went_well

    def _carry_out(
        self, verb: str, pool: _Pool, names: Sequence[ObjectName], batch: PageBatch, by: float
    ) -> Sequence[IntEnum]:
        named = list(zip(names, batch.buffers, strict=True))
        if verb == "read":
            reads = [Read(name, buffers, pool.shape) for name, buffers in named]
            return self._store.call(lambda backend: backend.read(reads, deadline=by), by)
        writes = [Write(name, buffers, pool.shape) for name, buffers in named]
        return self._store.call(lambda backend: backend.write(writes, deadline=by), by)

    async def _remove_ours(self, backend: StorageBackend, *, by: float) -> bool:
        ours = {
            (pool.names.namespace, pool.names.pool, pool.names.shard)
            for pool in self._pools.values()
        }
        names: list[ObjectName] = []
        async for stored in backend.objects():
            name = stored.name
            if (name.namespace, name.pool, name.shard) in ours:
                names.append(name)
            if time.monotonic() >= by:
                break
        gone: list[bool] = []
        for first in range(0, len(names), _REMOVED_AT_A_TIME):
            gone += await backend.remove(names[first : first + _REMOVED_AT_A_TIME], deadline=by)
        return all(gone) and time.monotonic() < by

    def _note(self, verb: str, outcomes: Sequence[IntEnum]) -> None:
        bad = [each for each in outcomes if each.name in _AILING]
        if not bad:
            return
        counts = Counter(each.name for each in bad)
        summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        self._complain(verb, f"{summary} of {len(outcomes)} pages")

    def _remember(self, verb: str, pages: int, page_bytes: int, took_s: float) -> None:
        if not self._config.enable_storage_metrics or not pages:
            return
        moved = MovedPages(pages, pages * page_bytes / 1e9 / max(took_s, 1e-9))
        with self._lock:
            (self._read if verb == "read" else self._written).append(moved)

    def _complain(self, verb: str, what: str) -> None:
        self._troubles[verb].warn(
            "HiCache's pages cannot be %s in the store %s (%s): they count as missing;"
            " check the store",
            verb,
            self._store.shown,
            what,
        )
