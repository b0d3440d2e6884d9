"""Jobs that bring chunks from vLLM's host memory to a store and back, each by a deadline that is kept.

vLLM gives a row of its memory away as soon as a job is over, and waits for a job that is not over for
ever: so a job must end in time, and nothing may touch a row after that. A store may be held up for
longer than any deadline, with the buffers of the call. So stores read and write memory of the tier's
own, and a chunk is copied between that and its row while its job is open, and only then. A call that
hangs keeps the memory that it has, and no job beyond its deadline.

That memory bounds what is on its way: jobs wait for it in their order, up to their deadlines.
"""

import asyncio
import logging
import mmap
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ....page_format.object_shape import ObjectShape
from ....storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ...blocking_store import BlockingStore
from .names import ChunkNames

LATE_S: Final = 1.0
"""A job whose store is so much later than its deadline ends without it."""
PINNED_PART: Final = 0.5
"""Rows of jobs that write, of all rows. vLLM can give none of them to another chunk meanwhile, so what
comes beyond fails at once, and its chunks stay in host memory alone."""

_log = logging.getLogger("vllm.lockstep")
_WELL: Final = (ReadOutcome.OK.name, WriteOutcome.OK.name, WriteOutcome.PRESENT.name)
Answer = TypeVar("Answer", ReadOutcome, WriteOutcome)
Rows = npt.NDArray[np.uint8]
"""[rows, bytes of a row]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a job."""

    number: int
    is_read: bool
    keys: Sequence[bytes]
    outcomes: Sequence[IntEnum]
    """For each key."""
    took_s: float
    was_refused: bool = False
    """It never began: it made no sense, there were too many, or the store is closed."""

    @property
    def went_well(self) -> bool:
        """Whether all chunks are where they were to be."""
        return not self.was_refused and all(each.name in _WELL for each in self.outcomes)

    def well(self) -> list[bytes]:
        """Return the keys of the chunks that are where they were to be."""
        return [
            key for key, each in zip(self.keys, self.outcomes, strict=True) if each.name in _WELL
        ]

    def not_well(self) -> list[bytes]:
        """Return the keys of the others."""
        moved = set(self.well())
        return [key for key in self.keys if key not in moved]


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    is_read: bool
    keys: list[bytes]
    rows: list[int]
    began: float
    by: float
    outcomes: list[IntEnum]
    is_open: bool = True
    """Whether rows may be touched for it."""
    touching: threading.Lock = field(default_factory=threading.Lock)
    """Held where rows are touched, and where they must not be any more."""
    future: "Future[None] | None" = None
    over_at: float | None = None

    def is_over(self) -> bool:
        return self.future is not None and self.future.done()

    def close(self) -> None:
        """Touch no row any more."""
        with self.touching:
            self.is_open = False


class _Memory:
    """Memory for chunks on their way in one direction. Used from the store's event loop."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        # It begins at a page, for stores that go past the kernel's cache. Unused, it costs nothing.
        whole = mmap.mmap(-1, rows * row_bytes)
        self.rows: Rows = np.frombuffer(whole, np.uint8).reshape(rows, row_bytes)
        self._free = list(range(rows))
        self._room = asyncio.Semaphore(rows)

    async def take(self, wanted: int, by: float) -> list[int]:
        """Return one row at least, and no more than are wanted; none if there is none in time."""
        try:
            async with asyncio.timeout(by - time.monotonic()):
                await self._room.acquire()
        except TimeoutError:
            return []
        taken = [self._free.pop()]
        while len(taken) < wanted and not self._room.locked():
            await self._room.acquire()
            taken.append(self._free.pop())
        return taken

    def give(self, rows: Sequence[int]) -> None:
        """Take rows back."""
        for row in rows:
            self._free.append(row)
            self._room.release()

    def buffer(self, row: int) -> tuple[memoryview]:
        """Return one row as a store wants it."""
        return (self.rows[row].data,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long jobs may take, and how much may be on its way in each direction."""

    read_s: float
    write_s: float
    in_flight_bytes: int


class Transfers:
    """The jobs of one tier. All but the copies is for one thread, which never waits here."""

    def __init__(self, primary: memoryview, limits: Limits) -> None:
        """`primary` is vLLM's host memory, [rows, bytes of a row]; given back by `close`."""
        self._primary: Rows | None = np.asarray(primary).view(np.uint8)
        self._count, self.row_bytes = self._primary.shape
        self._limits = limits
        rows = max(1, min(limits.in_flight_bytes // self.row_bytes, self._count))
        self._shape = ObjectShape.whole(self.row_bytes)
        self._ways = {is_read: _Memory(rows, self.row_bytes) for is_read in (False, True)}
        self._jobs: dict[int, _Job] = {}
        self._refused: list[Ended] = []
        self._pinned = 0
        self._store: BlockingStore | None = None
        self._names: ChunkNames | None = None

    @property
    def memory(self) -> list[memoryview]:
        """What stores read into and write from."""
        return [way.rows.reshape(-1).data for way in self._ways.values()]

    def begin_with(self, store: BlockingStore, names: ChunkNames) -> None:
        """Use this store, which is open."""
        self._store, self._names = store, names

    def begin(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], *, reads: bool
    ) -> None:
        """Begin a job, which `ended` will tell of whatever comes of it."""
        now = time.monotonic()
        limit = self._limits.read_s if reads else self._limits.write_s
        failed: IntEnum = ReadOutcome.FAILED if reads else WriteOutcome.FAILED
        late: IntEnum = ReadOutcome.TIMED_OUT if reads else WriteOutcome.TIMED_OUT
        job = _Job(number, reads, list(keys), list(rows), now, now + limit, [late] * len(keys))
        makes_sense = len(keys) == len(rows) and all(0 <= row < self._count for row in rows)
        pinned = self._pinned and self._pinned + len(rows) > PINNED_PART * self._count
        if self._store is None or not makes_sense or (pinned and not reads):
            self._refuse(job, failed)
            return
        try:
            job.future = self._store.begin(lambda backend: self._carry_out(backend, job))
        except Exception:  # noqa: BLE001 - the store is closed, and vLLM is told of each job.
            self._refuse(job, failed)
            return
        self._jobs[number] = job
        self._pinned += 0 if reads else len(rows)

    def ended(self) -> list[Ended]:
        """Return the jobs that are over since this was asked last; nothing touches their rows."""
        over, self._refused = self._refused, []
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if not job.is_over() and now < job.by + LATE_S:
                continue
            del self._jobs[job.number]
            job.close()
            self._pinned -= 0 if job.is_read else len(job.rows)
            over.append(
                Ended(
                    number=job.number,
                    is_read=job.is_read,
                    keys=job.keys,
                    outcomes=job.outcomes,
                    took_s=(job.over_at or now) - job.began,
                )
            )
        return over

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until every job is over, or so long; `ended` tells of them all then."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        for job in list(self._jobs.values()):
            until = job.by + LATE_S if give_up is None else min(give_up, job.by + LATE_S)
            assert job.future is not None
            wait([job.future], max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Touch vLLM's memory never again. Jobs that run end without it. Idempotent."""
        for job in self._jobs.values():
            job.close()
        self._primary = None
        self._store = None

    def _refuse(self, job: _Job, failed: IntEnum) -> None:
        self._refused.append(
            Ended(
                number=job.number,
                is_read=job.is_read,
                keys=job.keys,
                outcomes=[failed] * len(job.keys),
                took_s=0.0,
                was_refused=True,
            )
        )

    async def _carry_out(self, backend: StorageBackend, job: _Job) -> None:
        await self._move(backend, job)
        # The scheduler may look for it much later.
        job.over_at = time.monotonic()

    async def _move(self, backend: StorageBackend, job: _Job) -> None:
        """Move the chunks, as many at a time as there is memory for."""
        way, done = self._ways[job.is_read], 0
        while done < len(job.keys):
            memory = await way.take(len(job.keys) - done, job.by)
            if not memory:
                return
            try:
                part = slice(done, done + len(memory))
                move = self._read if job.is_read else self._write
                if not await move(backend, job, part, memory):
                    return
            finally:
                way.give(memory)
            done += len(memory)

    async def _read(
        self, backend: StorageBackend, job: _Job, part: slice, memory: Sequence[int]
    ) -> bool:
        """Read a part of a job and copy what is verified to its rows; False if the job is over."""
        way = self._ways[True]
        assert self._names is not None
        names = self._names.of(job.keys[part])
        reads = [
            Read(name, way.buffer(row), self._shape)
            for name, row in zip(names, memory, strict=True)
        ]
        outcomes = await _answers(
            backend.read(reads, deadline=job.by), len(reads), ReadOutcome.FAILED
        )
        with job.touching:
            if not job.is_open or self._primary is None:
                return False
            for row, source, outcome in zip(job.rows[part], memory, outcomes, strict=True):
                if outcome is ReadOutcome.OK:
                    np.copyto(self._primary[row], way.rows[source])
            job.outcomes[part] = outcomes
        return True

    async def _write(
        self, backend: StorageBackend, job: _Job, part: slice, memory: Sequence[int]
    ) -> bool:
        """Copy a part of a job from its rows and write it; False if the job is over."""
        way = self._ways[False]
        assert self._names is not None
        with job.touching:
            if not job.is_open or self._primary is None:
                return False
            for row, target in zip(job.rows[part], memory, strict=True):
                np.copyto(way.rows[target], self._primary[row])
        names = self._names.of(job.keys[part])
        writes = [
            Write(name, way.buffer(row), self._shape)
            for name, row in zip(names, memory, strict=True)
        ]
        outcomes = await _answers(
            backend.write(writes, deadline=job.by), len(writes), WriteOutcome.FAILED
        )
        with job.touching:
            if job.is_open:
                job.outcomes[part] = outcomes
        return True


async def _answers(
    call: Coroutine[Any, Any, list[Answer]], count: int, failed: Answer
) -> list[Answer]:
    """Return what a call answers for each key; a call that raises, against S1, has failed for all."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - vLLM is told of each job.
        _log.warning("the store failed as a whole: %r", error)
        return [failed] * count
