"""Batches of reads or writes of slots: the contract, and the one that works on any filesystem.

`Preadv` moves bytes by system calls, straight between the files and the caller's buffers. On a
mounted 3FS `usrbio.UsrbioTransfers` does the same through its rings.
"""

import os
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from ..buffers import move_all
from ..complaints import Complaints
from ..threaded_backend import Stop


class Extent(NamedTuple):
    """Bytes of a file that follow each other, and the memory that they go to or come from."""

    fd: int
    offset: int
    views: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return sum(map(len, self.views))


class Moved(IntEnum):
    """What became of the extents of one object."""

    WHOLE = 0
    SHORT = 1
    """The file ended or had a hole."""
    FAILED = 2
    LATE = 3
    """It was given up. Nothing touches the caller's memory; see `Transfers.lets_go` for the file."""


class Transfers(Protocol):
    """Moves extents between files and memory. Thread-safe."""

    text: str
    """What it is, for a log line."""
    lets_go: bool
    """Whether a write that was given up does not reach the file later either."""
    objects_at_a_time: int
    """How many writes are best given to one call."""

    def register(self, fd: int) -> None:
        """Let extents be in this file. Raises OSError."""
        ...

    def deregister(self, fd: int) -> None:
        """Forget this file, which is still open. Nothing may be under way on it."""
        ...

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
        ...

    def close(self) -> None:
        """Give back what moves needed; no thread may move anything any more. Idempotent."""
        ...


class Preadv:
    """Keeps the contract of `Transfers` by `preadv` and `pwritev`; `why` says why not by USRBIO.

    The calling thread does the work, so one write is given to each call, while what was just hashed is
    in the core's cache.
    """

    lets_go = True
    objects_at_a_time = 1

    def __init__(self, why: str, complaints: Complaints) -> None:
        self.text = f"preadv and pwritev, because {why}"
        self._complaints = complaints

    def register(self, fd: int) -> None:
        """See `Transfers`."""

    def deregister(self, fd: int) -> None:
        """See `Transfers`."""

    def move(
        self,
        objects: Sequence[Sequence[Extent]],
        stop: Stop,
        deadline: float,
        *,
        reads: bool,
        arrived: Callable[[int], None] | None = None,
    ) -> list[Moved]:
        moved = [Moved.LATE] * len(objects)
        for at, extents in enumerate(objects):
            if stop.due() or time.monotonic() >= deadline:
                break
            try:
                moved[at] = max((_move(each, reads=reads) for each in extents), default=Moved.WHOLE)
            except OSError as error:
                moved[at] = Moved.FAILED
                kind = "reads" if reads else "writes"
                self._complaints.say_failed(f"{kind} of slots fail", error.errno)
            if arrived is not None and moved[at] is Moved.WHOLE:
                arrived(at)
        return moved

    def close(self) -> None:
        """See `Transfers`."""


def _move(extent: Extent, *, reads: bool) -> Moved:
    """Move all bytes, as far as the file goes. Raises OSError."""
    system_call = os.preadv if reads else os.pwritev
    done = move_all(system_call, extent.fd, extent.views, extent.offset)
    return Moved.WHOLE if done == extent.nbytes else Moved.SHORT
