"""Rings over `preadv` and `pwritev`, for every filesystem that has no rings of its own.

The thread that waits does the work, operation by operation, the latest first: so nothing runs
outside of `wait`, nothing touches a caller's memory once the ring is drained, and nobody can come
to rely on an order that a real ring does not keep.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from .rings import Completion

_VIEWS_AT_A_TIME: Final = 512
"""Fewer than the kernel takes in one call (IOV_MAX)."""


class PreadRings:
    """Makes such rings; see `RingClient`. Thread-safe."""

    def __init__(self, why: str) -> None:
        self.text = f"rings over preadv and pwritev, because {why}"
        self._lock = threading.Lock()
        self._registered: set[int] = set()

    @property
    def any_memory(self) -> bool:
        """See `RingClient`."""
        return True

    def ring(self, *, reads: bool, entries: int, memory_bytes: int) -> "PreadRing":
        """Return a new ring."""
        return PreadRing(self, reads=reads, entries=entries, memory_bytes=memory_bytes)

    def register(self, fd: int) -> None:
        """Let rings use this descriptor."""
        with self._lock:
            if fd in self._registered:
                raise OSError(errno.EINVAL, f"descriptor {fd} is registered already")
            self._registered.add(fd)

    def deregister(self, fd: int) -> None:
        """Forget this descriptor."""
        with self._lock:
            self._registered.discard(fd)

    def knows(self, fd: int) -> bool:
        """Say whether the descriptor is registered."""
        return fd in self._registered


class _Operation(NamedTuple):
    views: Sequence[memoryview]
    fd: int
    offset: int
    token: int


class PreadRing:
    """One ring; see `Ring`."""

    any_memory = True

    def __init__(self, client: PreadRings, *, reads: bool, entries: int, memory_bytes: int) -> None:
        self.entries = entries
        self.memory = memoryview(mmap.mmap(-1, memory_bytes))
        self._client = client
        self._move = os.preadv if reads else os.pwritev
        self._prepared: list[_Operation] = []
        self._submitted: list[_Operation] = []

    @property
    def pending(self) -> int:
        """See `Ring`."""
        return len(self._prepared) + len(self._submitted)

    def prepare(self, views: Sequence[memoryview], fd: int, offset: int, token: int) -> None:
        """Add one operation; see `Ring`."""
        if self.pending >= self.entries:
            raise OSError(errno.EAGAIN, f"the ring has {self.entries} operations already")
        if not self._client.knows(fd):
            raise OSError(errno.EBADF, f"descriptor {fd} is not registered")
        self._prepared.append(_Operation(views, fd, offset, token))

    def submit(self) -> None:
        """Let what was prepared be done by the next `wait`."""
        self._submitted += self._prepared
        self._prepared.clear()

    def wait(self, least: int, deadline: float) -> list[Completion]:
        """Do submitted operations until `least` have ended; see `Ring`."""
        ended: list[Completion] = []
        while self._submitted and len(ended) < least and time.monotonic() < deadline:
            operation = self._submitted.pop()
            ended.append(Completion(operation.token, self._do(operation)))
        return ended

    def drain(self, deadline: float) -> bool:  # noqa: ARG002 - nothing runs, so nothing is waited for.
        """Forget all operations: none runs outside of `wait`."""
        self._prepared.clear()
        self._submitted.clear()
        return True

    def close(self) -> None:
        """Let go of the memory, which goes when its last view does."""
        self.drain(0.0)
        self.memory = memoryview(b"")

    def _do(self, operation: _Operation) -> int:
        """Move all bytes, as far as the file goes."""
        views, done = list(operation.views), 0
        try:
            while views:
                count = self._move(operation.fd, views[:_VIEWS_AT_A_TIME], operation.offset + done)
                if not count:
                    break
                done += count
                views = _without(views, count)
        except OSError as error:
            return -(error.errno or errno.EIO)
        return done


def _without(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return `views` without their first `count` bytes, and without empty ones before the rest."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []
