"""Fetches and persists in flight: their batches, and what the outcomes of these add up to.

Batches of one operation are read or written side by side and end in any order; what is reported is
always a prefix. The storage loop runs the batches, and everything here happens on its thread.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...coordinator.ballot import Capped, Landed, Progress, TransferEnded
from ...errors import InternalError, StorageError
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import After, Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ...storage_backends.records.shardings import OWN, Shardings
from ..protocol.orders import KV_POOL, Fetch, ObjectTransfer, Put
from .pools import HostPool, PageLease
from .writers import WriterShare

BATCH_PAGES = 512
"""The most pages that one call to the backend moves."""

_ELSEWHERE = (ReadOutcome.MISSING, ReadOutcome.LACKING)
"""Outcomes after which a page is looked for under other names."""
_BADNESS = (
    ReadOutcome.OK,
    ReadOutcome.MISSING,
    ReadOutcome.LACKING,
    ReadOutcome.CORRUPT,
    ReadOutcome.FAILED,
    ReadOutcome.TIMED_OUT,
)
"""Outcomes from good to bad: a page has the worst of those of its objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjects:
    """The objects of this rank: their names in the store, and their pages on the host."""

    pools: Mapping[str, HostPool]
    namespace: str
    writer: WriterShare
    """Says which of the pages that are the same on every rank this one writes."""
    shardings: Shardings
    """Knows the objects of groups of other TP sizes, where pages may be as well."""

    def names(self, pool: str, keys: Iterable[bytes]) -> list[ObjectName]:
        """Return the names of this rank's shards of pages."""
        namespace, shard = self.namespace, self._pool(pool).layout.name
        return [ObjectName(namespace, key.hex(), pool, shard) for key in keys]

    def memory(self) -> list[memoryview]:
        """Return the memory that all pages lie in."""
        return [pool.memory for pool in self.pools.values()]

    def page_views(self, pool: str, slots: Sequence[int]) -> list[memoryview]:
        """Return the bytes of host pages; writable, no copy."""
        return self._pool(pool).page_views(slots)

    def leases(self, pool: str, slots: Sequence[int]) -> list[PageLease]:
        """Return the bytes of host pages as they are now; see `HostPool.leases`."""
        return self._pool(pool).leases(slots)

    def begin_writes(self, pool: str, slots: Sequence[int]) -> None:
        """End the leases of host pages that are about to be written."""
        self._pool(pool).begin_writes(slots)

    def page_bytes(self, pool: str) -> int:
        """Return the length of a page: of an object with the columns that are kept here."""
        return self._pool(pool).layout.page_bytes

    def shape(self, pool: str) -> ObjectShape:
        """Return the shape of this rank's objects, holding what pages have here."""
        return self._pool(pool).layout.shape

    def own(self, transfer: ObjectTransfer) -> ObjectTransfer:
        """Return what of `transfer` this rank is to write."""
        if not self._pool(transfer.pool).layout.replicated:
            return transfer
        own = [
            (key, page)
            for key, page in zip(transfer.keys, transfer.pages, strict=True)
            if self.writer.has(key)
        ]
        keys, pages = tuple(key for key, _ in own), tuple(page for _, page in own)
        return ObjectTransfer(transfer.pool, keys, pages, transfer.stored)

    def _pool(self, name: str) -> HostPool:
        pool = self.pools.get(name)
        if pool is None:
            raise InternalError(f"an order names pool {name!r}; known: {', '.join(self.pools)}")
        return pool


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring pages of one transfer of an operation, moved by one call to the backend."""

    first: int
    """The position of the first page in the sequence of all that the operation moves."""
    pool: str
    objects: tuple[tuple[ObjectName, memoryview], ...]
    shape: ObjectShape
    """The shape of each object."""
    nbytes: int
    stored: bool
    """See `ObjectTransfer`."""


class Transfer(ABC):
    """One fetch or persist, from its order until no call of the backend touches its pages."""

    def __init__(self, order: Fetch | Put, deadline: float, objects: RankObjects) -> None:
        self.operation = order.operation
        self.deadline = deadline
        self.calls: set[asyncio.Task[Sequence[int]]] = set()
        """The backend's calls that have not returned."""
        self.driver: asyncio.Task[None] | None = None
        """The task that begins the batches, one after the other, as there is room for them."""
        self.bytes_ok = 0
        self._transfers = order.transfers
        self._objects = objects
        self._pages = sum(len(transfer.keys) for transfer in order.transfers)

    def batches(self, bytes_max: Callable[[], int]) -> Iterator[Batch]:
        """Yield the batches in order, none larger than `bytes_max` says then, but for a single page."""
        first = 0
        for transfer in map(self._part, self._transfers):
            page_bytes = self._objects.page_bytes(transfer.pool)
            shape = self._objects.shape(transfer.pool)
            start = 0
            while start < len(transfer.keys):
                step = max(1, min(BATCH_PAGES, bytes_max() // page_bytes))
                objects = self._objects_of(transfer, start, start + step)
                nbytes = len(objects) * page_bytes
                yield Batch(first + start, transfer.pool, objects, shape, nbytes, transfer.stored)
                start += step
            first += len(transfer.keys)

    def is_driven(self) -> bool:
        """Say whether more batches may begin."""
        return self.driver is not None and not self.driver.done()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return everything that runs for this transfer."""
        return [*self.calls] if self.driver is None else [self.driver, *self.calls]

    @abstractmethod
    def wants(self, batch: Batch) -> bool:
        """Say whether there is still a point in moving `batch`."""

    def goes_first(self, batch: Batch) -> bool:  # noqa: ARG002 - mostly none does.
        """Say whether the others are to wait until `batch` has been moved."""
        return False

    @abstractmethod
    async def call(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        """Move a batch; return the backend's outcomes."""

    @abstractmethod
    def returned(self, batch: Batch, outcomes: Sequence[int] | None) -> list[Progress]:
        """Note the outcomes of a batch (None: the call raised); return what is new."""

    @abstractmethod
    def concluded(self) -> list[Progress]:
        """Return what is to be said once nothing more will be moved."""

    def _part(self, transfer: ObjectTransfer) -> ObjectTransfer:
        """Return what of `transfer` is moved here."""
        return transfer

    def _objects_of(
        self, transfer: ObjectTransfer, start: int, stop: int
    ) -> tuple[tuple[ObjectName, memoryview], ...]:
        names = self._objects.names(transfer.pool, transfer.keys[start:stop])
        views = self._objects.page_views(transfer.pool, transfer.pages[start:stop])
        return tuple(zip(names, views, strict=True))


class FetchTransfer(Transfer):
    """Objects on their way into host pages.

    The pages of all pools are one sequence. Progress counts its leading pages, and the first one that
    cannot land caps it; what lies beyond is not read any more.
    """

    def __init__(self, order: Fetch, deadline: float, objects: RankObjects) -> None:
        super().__init__(order, deadline, objects)
        self._there = [False] * self._pages
        """Which pages have landed."""
        self._landed = 0
        self._ceiling = self._pages

    def _objects_of(
        self, transfer: ObjectTransfer, start: int, stop: int
    ) -> tuple[tuple[ObjectName, memoryview], ...]:
        objects = super()._objects_of(transfer, start, stop)
        self._objects.begin_writes(transfer.pool, transfer.pages[start:stop])
        return objects

    def wants(self, batch: Batch) -> bool:
        return batch.first < self._ceiling

    async def call(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        shardings = self._objects.shardings
        outcomes = [ReadOutcome.MISSING] * len(batch.objects)
        for tp_size in shardings.order(batch.pool):
            missing = [at for at, outcome in enumerate(outcomes) if outcome in _ELSEWHERE]
            if not missing:
                break
            objects = [batch.objects[at] for at in missing]
            found = await self._read(backend, batch, objects, tp_size)
            for at, outcome in zip(missing, found, strict=True):
                outcomes[at] = outcome
            if found.count(ReadOutcome.OK) * 2 > len(found):
                shardings.prefer(batch.pool, tp_size)
        return outcomes

    async def _read(
        self,
        backend: StorageBackend,
        batch: Batch,
        objects: Sequence[tuple[ObjectName, memoryview]],
        tp_size: int,
    ) -> list[ReadOutcome]:
        """Read pages out of the objects of groups of one TP size; return one outcome for each."""
        if tp_size == OWN:
            reads = [Read(name, (buffer,), batch.shape) for name, buffer in objects]
            return await backend.read(reads, deadline=self.deadline)
        sources = self._objects.shardings.sources(batch.pool, tp_size)
        reads = [
            Read(
                ObjectName(name.namespace, name.key, name.pool, source.name),
                tuple(buffer[each] for each in source.slices),
                source.shape,
            )
            for name, buffer in objects
            for source in sources
        ]
        outcomes = await backend.read(reads, deadline=self.deadline)
        step = len(sources)
        return [
            max(outcomes[at : at + step], key=_BADNESS.index)
            for at in range(0, len(outcomes), step)
        ]

    def returned(self, batch: Batch, outcomes: Sequence[int] | None) -> list[Progress]:
        if outcomes is None:
            return self._cap(batch.first)
        progress: list[Progress] = []
        ok = [outcome == ReadOutcome.OK for outcome in outcomes]
        self._there[batch.first : batch.first + len(ok)] = ok
        self.bytes_ok += ok.count(True) * self._objects.page_bytes(batch.pool)
        if False in ok:
            progress += self._cap(batch.first + ok.index(False))
        before = self._landed
        while self._landed < self._pages and self._there[self._landed]:
            self._landed += 1
        if self._landed > before:
            progress.append(Landed(self.operation, self._landed))
        return progress

    def concluded(self) -> list[Progress]:
        return self._cap(self._landed)

    def _cap(self, position: int) -> list[Progress]:
        if position >= self._ceiling:
            return []
        self._ceiling = position
        return [Capped(self.operation, position)]


class PersistTransfer(Transfer):
    """Host pages on their way into objects: all of them, or the operation has failed.

    Pages whose writer is another rank are done as far as this one goes.
    """

    def __init__(self, order: Put, deadline: float, objects: RankObjects) -> None:
        super().__init__(order, deadline, objects)
        self._failed = False
        self._done = 0
        self._after: ObjectName | None = None
        """The page that all of them continue: one before them, or else the first of them."""
        self._distance = 0
        """How many pages after that the first of them comes."""
        if order.after:
            (self._after,) = objects.names(KV_POOL, (order.after,))
            self._distance = order.distance

    def wants(self, batch: Batch) -> bool:  # noqa: ARG002 - a failure spares them all.
        return not self._failed

    def goes_first(self, batch: Batch) -> bool:
        # It gets a new time of use, from which those of the others are counted.
        return batch.stored and not (batch.first or self._distance)

    async def call(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        await self._objects.shardings.announce(backend, time.monotonic(), self.deadline)
        if self._after is None:
            self._after = batch.objects[0][0]
        distance = self._distance + batch.first
        after = After(self._after, distance) if distance else None
        outcomes: list[WriteOutcome] = [WriteOutcome.PRESENT] * len(batch.objects)
        lacking = await self._lacking(backend, batch)
        objects = [batch.objects[at] for at in lacking]
        writes = [Write(name, (buffer,), batch.shape, after) for name, buffer in objects]
        written = await backend.write(writes, deadline=self.deadline)
        for at, outcome in zip(lacking, written, strict=True):
            outcomes[at] = outcome
        return outcomes

    async def _lacking(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        """Return which objects are to be written, or used if they are there.

        Not those of which groups of another TP size have all that this rank had read from them.
        """
        everything = range(len(batch.objects))
        sizes = self._objects.shardings.elsewhere(batch.pool) if batch.stored else ()
        if not sizes:
            return everything
        names = [name for name, _ in batch.objects]
        there = await backend.exists(names, deadline=self.deadline)
        missing = [at for at in everything if not there[at]]
        for size in sizes:
            sources = self._objects.shardings.sources(batch.pool, size)
            shards = [name._replace(shard=each.name) for name in names for each in sources]
            found = await backend.exists(shards, deadline=self.deadline)
            step = len(sources)
            missing = [at for at in missing if not all(found[at * step : (at + 1) * step])]
        ours = {at for at in everything if there[at]}
        return [at for at in everything if at in ours or at in missing]

    def returned(self, batch: Batch, outcomes: Sequence[int] | None) -> list[Progress]:
        if outcomes is None:
            self._failed = True
            return []
        for outcome, (_, buffer) in zip(outcomes, batch.objects, strict=True):
            if outcome in (WriteOutcome.OK, WriteOutcome.PRESENT):
                self._done += 1
            else:
                self._failed = True
            if outcome == WriteOutcome.OK:
                self.bytes_ok += buffer.nbytes
        return []

    def concluded(self) -> list[Progress]:
        return [TransferEnded(self.operation, self._done == self._pages and not self._failed)]

    def _part(self, transfer: ObjectTransfer) -> ObjectTransfer:
        own = self._objects.own(transfer)
        self._done += len(transfer.keys) - len(own.keys)
        return own


def outcomes_of(call: asyncio.Task[Sequence[int]], batch: Batch) -> Sequence[int]:
    """Return what a call that is done has returned, one outcome for each object of its batch.

    Raises what the backend raised, and `StorageError` for what it must not do.
    """
    if call.cancelled():
        raise StorageError("the call was cancelled")
    outcomes = call.result()
    if len(outcomes) != len(batch.objects):
        raise StorageError(f"{len(outcomes)} outcomes for {len(batch.objects)} objects")
    return outcomes
