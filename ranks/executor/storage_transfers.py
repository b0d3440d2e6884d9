"""Fetches and persists in flight: their batches, and what the outcomes of these add up to.

Batches of one operation are read or written side by side and end in any order; what is reported is
always a prefix. The storage loop runs the batches, and everything here happens on its thread.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...coordinator.ballot import Capped, Ended, Landed, Progress
from ...errors import InternalError, StorageError
from ...storage_backends.base import (
    ObjectName,
    Read,
    ReadOutcome,
    StorageBackend,
    Write,
    WriteOutcome,
)
from ..orders import Fetch, ObjectTransfer, Persist
from .pools import HostPool

BATCH_PAGES = 64
BATCH_BYTES = 4 << 20
"""The most that one call to the backend moves, except that one page always goes whole. Enough to
make the call itself cheap, and little enough that progress is seen while it grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPlaces:
    """Where an operation's objects are: their names in the store, their pages on the host."""

    pools: Mapping[str, HostPool]
    namespace: str

    def name(self, pool: str, key: bytes) -> ObjectName:
        """Return the name of this rank's shard of one page."""
        return ObjectName(self.namespace, key.hex(), pool, self._pool(pool).layout.name)

    def page(self, pool: str, slot: int) -> memoryview:
        """Return the bytes of a host page; writable, no copy."""
        return self._pool(pool).page(slot)

    def page_bytes(self, pool: str) -> int:
        """Return the length of a page, and so of its objects."""
        return self._pool(pool).layout.page_bytes

    def _pool(self, name: str) -> HostPool:
        pool = self.pools.get(name)
        if pool is None:
            raise InternalError(f"an order names pool {name!r}; known: {', '.join(self.pools)}")
        return pool


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring page positions of an operation, moved by one call to the backend."""

    positions: tuple[int, ...]
    """The position of each object; with several pools a position occurs once for each."""
    objects: tuple[tuple[ObjectName, memoryview], ...]
    nbytes: int


class Transfer(ABC):
    """One fetch or persist, from its order until no call of the backend touches its pages."""

    def __init__(self, order: Fetch | Persist, deadline: float, places: ObjectPlaces) -> None:
        self.operation = order.operation
        self.deadline = deadline
        self.calls: set[asyncio.Task[Sequence[int]]] = set()
        """The backend's calls that have not returned."""
        self.driver: asyncio.Task[None] | None = None
        """Begins the batches, one after the other, as there is room for them."""
        self.bytes_ok = 0
        self._transfers = order.transfers
        self._places = places
        self._positions = max((len(transfer.keys) for transfer in order.transfers), default=0)

    def batches(self, bytes_max: int) -> Iterator[Batch]:
        """Yield the batches in order, none larger than `bytes_max` but for a single page."""
        row = sum(self._places.page_bytes(transfer.pool) for transfer in self._transfers)
        step = max(1, min(BATCH_PAGES, min(BATCH_BYTES, bytes_max) // max(1, row)))
        for first in range(0, self._positions, step):
            last = min(first + step, self._positions)
            parts = [self._part(transfer, first, last) for transfer in self._transfers]
            objects = tuple(chain.from_iterable(parts))
            positions = tuple(
                position
                for transfer in self._transfers
                for position in range(first, min(last, len(transfer.keys)))
            )
            yield Batch(positions, objects, sum(buffer.nbytes for _, buffer in objects))

    def is_driven(self) -> bool:
        """Say whether more batches may begin."""
        return self.driver is not None and not self.driver.done()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return everything that runs for this transfer."""
        return [*self.calls] if self.driver is None else [self.driver, *self.calls]

    @abstractmethod
    def wants(self, batch: Batch) -> bool:
        """Say whether there is still a point in moving `batch`."""

    @abstractmethod
    async def call(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        """Move a batch; return the backend's outcomes."""

    @abstractmethod
    def returned(self, batch: Batch, outcomes: Sequence[int] | None) -> list[Progress]:
        """Note the outcomes of a batch (None: the call raised); return what is new."""

    @abstractmethod
    def concluded(self) -> list[Progress]:
        """Return what is to be said once nothing more will be moved."""

    def _part(
        self, transfer: ObjectTransfer, first: int, last: int
    ) -> list[tuple[ObjectName, memoryview]]:
        return [
            (self._places.name(transfer.pool, key), self._places.page(transfer.pool, page))
            for key, page in zip(transfer.keys[first:last], transfer.pages[first:last], strict=True)
        ]


class FetchTransfer(Transfer):
    """Objects on their way into host pages.

    Position i has landed when all pools that have a page i have it. Progress counts leading
    positions, and the first one that cannot land caps it; what lies beyond is not read any more.
    """

    def __init__(self, order: Fetch, deadline: float, places: ObjectPlaces) -> None:
        super().__init__(order, deadline, places)
        self._missing = [
            sum(position < len(transfer.keys) for transfer in order.transfers)
            for position in range(self._positions)
        ]
        """Objects of each position that have not landed."""
        self._landed = 0
        self._ceiling = self._positions

    def wants(self, batch: Batch) -> bool:
        return batch.positions[0] < self._ceiling

    async def call(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        reads = [Read(name, buffer) for name, buffer in batch.objects]
        return await backend.read(reads, deadline=self.deadline)

    def returned(self, batch: Batch, outcomes: Sequence[int] | None) -> list[Progress]:
        if outcomes is None:
            return self._cap(min(batch.positions))
        progress: list[Progress] = []
        for position, outcome, (_, buffer) in zip(
            batch.positions, outcomes, batch.objects, strict=True
        ):
            if outcome == ReadOutcome.OK:
                self._missing[position] -= 1
                self.bytes_ok += buffer.nbytes
            else:
                progress += self._cap(position)
        before = self._landed
        while self._landed < self._positions and not self._missing[self._landed]:
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
    """Host pages on their way into objects: all of them, or the operation has failed."""

    _failed = False
    _written = 0

    def wants(self, batch: Batch) -> bool:  # noqa: ARG002 - a failure spares them all.
        return not self._failed

    async def call(self, backend: StorageBackend, batch: Batch) -> Sequence[int]:
        writes = [Write(name, buffer) for name, buffer in batch.objects]
        return await backend.write(writes, deadline=self.deadline)

    def returned(self, batch: Batch, outcomes: Sequence[int] | None) -> list[Progress]:
        if outcomes is None:
            self._failed = True
            return []
        for outcome, (_, buffer) in zip(outcomes, batch.objects, strict=True):
            if outcome in (WriteOutcome.OK, WriteOutcome.PRESENT):
                self._written += 1
            else:
                self._failed = True
            if outcome == WriteOutcome.OK:
                self.bytes_ok += buffer.nbytes
        return []

    def concluded(self) -> list[Progress]:
        whole = self._written == sum(len(transfer.keys) for transfer in self._transfers)
        return [Ended(self.operation, whole and not self._failed)]


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
