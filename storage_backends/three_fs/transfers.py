"""Batches of reads or writes of slots: the interface, and an implementation for any filesystem.

`Preadv` moves bytes by system calls, directly between the files and the caller's buffers. On a mounted
3FS, `usrbio.UsrbioTransfers` does the same through the rings of 3FS.
"""

import os
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from ..buffers import move_all
from ..error_log import ErrorLog
from ..threaded_backend import Stop


class Extent(NamedTuple):
    """A range of bytes of a file, with the memory that the bytes are read into or written from."""

    fd: int
    offset: int
    views: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the extent."""
        return sum(map(len, self.views))


class MovedObject(IntEnum):
    """The outcome of moving the extents (byte ranges) of one object."""

    WHOLE = 0
    SHORT = 1
    """The file ended before the end of an extent, or had a hole there."""
    FAILED = 2
    LATE = 3
    """The transfer was abandoned at the deadline, and touches the caller's memory no longer. If
    `Transfers.lets_go` is False, an abandoned write may still change the file."""


class Transfers(Protocol):
    """Moves extents (byte ranges of a file) between files and memory. Thread-safe."""

    text: str
    """A description of how bytes are moved, for the log."""
    lets_go: bool
    """False if a write that was abandoned may still change the file later."""
    objects_at_a_time: int
    """The number of objects that a caller should pass to one `move` call, for the fastest writes."""

    def register(self, fd: int) -> None:
        """Prepare this open file for transfers. Raises OSError."""
        ...

    def deregister(self, fd: int) -> None:
        """Undo `register` for this file, which is still open and in no transfer."""
        ...

    def move(
        self,
        objects: Sequence[Sequence[Extent]],
        stop: Stop,
        deadline: float,
        *,
        reads: bool,
        arrived: Callable[[int], None] | None = None,
    ) -> list[MovedObject]:
        """Move all extents of each object; return the outcome of each object.

        Stops at `deadline` or when `stop` is due. After the return nothing touches the views. `arrived`
        is called with the index of each object as soon as the whole object has been moved.
        """
        ...

    def close(self) -> None:
        """Release all resources; the caller ensures that no transfer is in progress. Idempotent."""
        ...


class Preadv:
    """`Transfers` by `preadv` and `pwritev`; `why` states, for the log, why USRBIO is not used.

    The calling thread does the transfers. Writes are fastest with one object per call, because the
    object was just hashed and is still in the core's cache.
    """

    lets_go = True
    objects_at_a_time = 1

    def __init__(self, why: str, complaints: ErrorLog) -> None:
        self.text = f"preadv and pwritev, because {why}"
        self._complaints = complaints

    def register(self, fd: int) -> None:
        """Do nothing, because `preadv` and `pwritev` need no registered files."""

    def deregister(self, fd: int) -> None:
        """Do nothing, because `preadv` and `pwritev` need no registered files."""

    def move(
        self,
        objects: Sequence[Sequence[Extent]],
        stop: Stop,
        deadline: float,
        *,
        reads: bool,
        arrived: Callable[[int], None] | None = None,
    ) -> list[MovedObject]:
        moved = [MovedObject.LATE] * len(objects)
        for at, extents in enumerate(objects):
            if stop.due() or time.monotonic() >= deadline:
                break
            try:
                moved[at] = max(
                    (_move(each, reads=reads) for each in extents), default=MovedObject.WHOLE
                )
            except OSError as error:
                moved[at] = MovedObject.FAILED
                kind = "reads" if reads else "writes"
                self._complaints.log_failure(f"{kind} of slots fail", error.errno)
            if arrived is not None and moved[at] is MovedObject.WHOLE:
                arrived(at)
        return moved

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


def _move(extent: Extent, *, reads: bool) -> MovedObject:
    """Move the bytes of one extent, up to the end of the file. Raises OSError."""
    system_call = os.preadv if reads else os.pwritev
    done = move_all(system_call, extent.fd, extent.views, extent.offset)
    return MovedObject.WHOLE if done == extent.nbytes else MovedObject.SHORT
