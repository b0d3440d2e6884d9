"""Batches of reads or writes of slots, through rings of the calling thread's own.

Where rings take any memory, bytes go straight between the files and the caller's buffers. Elsewhere
they go through the ring's memory, and what a ring that does not answer may still do later, it does
there and not in anybody's buffer.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Final, NamedTuple

from ...page_format.object_header import HEADER_BYTES
from ..thread_calls import Stop
from .complaints import Complaints
from .rings import Ring, RingClient

ENTRIES: Final = 128
"""Operations in a ring at a time; more than one object can need (see `PARTS_MAX`)."""
_STAGING_BYTES: Final = 16 << 20
"""What a ring with memory of its own has of it, or room for one slot if that is more."""
_POLL_S: Final = 0.05
"""How long a wait goes on before it looks whether it was asked to stop."""

_DRAIN_S: Final = 1.0
"""How long closing waits for a ring that does not answer."""


class Extent(NamedTuple):
    """Bytes of a file that follow each other, and the memory that they go to or come from."""

    fd: int
    offset: int
    views: Sequence[memoryview]


class Moved(IntEnum):
    """What became of the extents of one object."""

    WHOLE = 0
    SHORT = 1
    """The file ended or had a hole."""
    FAILED = 2
    LATE = 3
    """It was given up. Nothing touches the caller's memory; see `Transfers.lets_go` for the file."""


class Transfers:
    """Moves extents. Thread-safe: each thread has a ring for reads and one for writes."""

    def __init__(self, client: RingClient, slot_bytes: int, complaints: Complaints) -> None:
        self._client = client
        self._complaints = complaints
        staging = -(-_STAGING_BYTES // slot_bytes) * slot_bytes
        self._memory_bytes = HEADER_BYTES if client.any_memory else staging
        self._own = threading.local()
        self._lock = threading.Lock()
        self._rings: list[Ring] = []

    @property
    def lets_go(self) -> bool:
        """Whether a write that was given up does not reach the file later either."""
        return self._client.any_memory

    @property
    def objects_at_a_time(self) -> int:
        """How many writes are best given to one call.

        Where the thread does the work itself that is one, while what was just hashed is in cache.
        """
        return 1 if self._client.any_memory else ENTRIES

    def move(
        self,
        objects: Sequence[Sequence[Extent]],
        stop: Stop,
        deadline: float,
        *,
        reads: bool,
        arrived: Callable[[int], None] | None = None,
    ) -> list[Moved]:
        """Move all extents of each object; return what became of each.

        Stops at `deadline` or when `stop` is due. When this returns, nothing touches the views.
        `arrived` is called with the number of each object that is whole, as soon as it is.
        """
        moved = [Moved.LATE] * len(objects)
        try:
            ring = self._ring(reads=reads)
        except OSError as error:
            self._complaints.say(f"no ring: {error}", "no ring could be made: %s", error)
            return [Moved.FAILED] * len(objects)
        for wave in _waves(objects, ring):
            if stop.due() or not ring.drain(deadline):
                break
            try:
                one = _Wave(ring, objects, wave, moved, arrived, reads=reads)
                one.run(stop, deadline)
                for number in one.failures:
                    kind = "reads" if reads else "writes"
                    self._complaints.say_failed(f"{kind} of slots fail", number)
            except OSError as error:
                self._complaints.say(
                    f"ring: {error}", "a ring failed and is not used any more: %s", error
                )
                self._discard(ring, reads=reads)
                # Where the ring may still do what it was given, that is not the end of it.
                for at in wave:
                    moved[at] = Moved.FAILED if ring.any_memory else Moved.LATE
                break
        return moved

    def close(self) -> None:
        """Close all rings; no thread may use one any more. Idempotent."""
        with self._lock:
            rings, self._rings = self._rings, []
        for ring in rings:
            # The files are deregistered next, and nothing should be under way on them then.
            ring.drain(time.monotonic() + _DRAIN_S)
            ring.close()

    def _ring(self, *, reads: bool) -> Ring:
        name = "reading" if reads else "writing"
        ring: Ring | None = getattr(self._own, name, None)
        if ring is None:
            ring = self._client.ring(reads=reads, entries=ENTRIES, memory_bytes=self._memory_bytes)
            setattr(self._own, name, ring)
            with self._lock:
                self._rings.append(ring)
        return ring

    def _discard(self, ring: Ring, *, reads: bool) -> None:
        delattr(self._own, "reading" if reads else "writing")
        with self._lock:
            self._rings.remove(ring)
        with suppress(OSError):
            ring.drain(time.monotonic())
            ring.close()


class _Wave:
    """Some of the objects, all in the ring at once. `moved` is where their ends are noted."""

    def __init__(
        self,
        ring: Ring,
        objects: Sequence[Sequence[Extent]],
        wave: range,
        moved: list[Moved],
        arrived: Callable[[int], None] | None,
        *,
        reads: bool,
    ) -> None:
        self._ring = ring
        self._arrived = arrived
        self._reads = reads
        self._moved = moved
        self._extents = [(at, extent) for at in wave for extent in objects[at]]
        self._staged: list[memoryview] = []
        self._left = {at: len(objects[at]) for at in wave}
        self._worst = dict.fromkeys(wave, Moved.WHOLE)
        self.failures: set[int] = set()
        """The errnos of operations that failed."""

    def run(self, stop: Stop, deadline: float) -> None:
        """Move the extents of all objects. Raises OSError where the ring fails."""
        ring, at = self._ring, 0
        try:
            for token, (_, extent) in enumerate(self._extents):
                views = extent.views
                if not ring.any_memory:
                    nbytes = _nbytes(extent)
                    staged = ring.memory[at : at + nbytes]
                    at += nbytes
                    if not self._reads:
                        _copy(extent.views, staged, into=True)
                    self._staged.append(staged)
                    views = (staged,)
                ring.prepare(views, extent.fd, extent.offset, token)
            ring.submit()
            while ring.pending and not stop.due() and time.monotonic() < deadline:
                for token, result in ring.wait(1, min(deadline, time.monotonic() + _POLL_S)):
                    self._note(token, result)
        finally:
            # At once, so that a ring that takes the caller's memory lets go of it.
            ring.drain(0.0)

    def _note(self, token: int, result: int) -> None:
        at, extent = self._extents[token]
        if result < 0:
            self._worst[at] = Moved.FAILED
            self.failures.add(-result)
        elif result != _nbytes(extent):
            self._worst[at] = max(self._worst[at], Moved.SHORT)
        elif self._reads and self._staged:
            _copy(extent.views, self._staged[token], into=False)
        self._left[at] -= 1
        if not self._left[at]:
            self._moved[at] = self._worst[at]
            if self._arrived is not None and self._worst[at] is Moved.WHOLE:
                self._arrived(at)


def _waves(objects: Sequence[Sequence[Extent]], ring: Ring) -> Iterator[range]:
    """Cut neighbouring objects into waves that fit into the ring and its memory."""
    start = operations = nbytes = 0
    for at, extents in enumerate(objects):
        more = 0 if ring.any_memory else sum(map(_nbytes, extents))
        full = operations + len(extents) > ring.entries or nbytes + more > len(ring.memory)
        if full and at > start:
            yield range(start, at)
            start, operations, nbytes = at, 0, 0
        operations += len(extents)
        nbytes += more
    if start < len(objects):
        yield range(start, len(objects))


def _nbytes(extent: Extent) -> int:
    return sum(map(len, extent.views))


def _copy(views: Sequence[memoryview], staged: memoryview, *, into: bool) -> None:
    at = 0
    for view in views:
        part = staged[at : at + len(view)]
        if into:
            part[:] = view
        else:
            view[:] = part
        at += len(view)
