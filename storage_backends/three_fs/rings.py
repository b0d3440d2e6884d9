"""The contract of a ring: many reads, or many writes, prepared, submitted and waited for together.

It is the contract of USRBIO, the native client of 3FS, in the words that this package needs. One
contract suite (`tests/storage_backends/three_fs/test_rings.py`) holds both implementations to it:
`usrbio_rings`, which is that client, and `pread_rings`, which does the same with system calls on any
filesystem.

- A ring is either for reads or for writes, belongs to one thread, and takes `entries` operations
  between a `prepare` and the `wait` that gives its end back.
- An operation may begin as soon as it is prepared, and surely does once it is submitted.
- Ends come in any order. The result is the number of bytes, or a negative errno. Fewer bytes than
  were asked for mean the end of the file or a hole.
- A file descriptor is registered before its first operation and deregistered before it is closed.
- Every operation is on the ring's own memory, unless the ring takes any memory. That is what makes
  zero copy possible where system calls do the work.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Completion(NamedTuple):
    """The end of one operation."""

    token: int
    """What `prepare` was given."""
    result: int
    """How many bytes were moved, or a negative errno."""


class Ring(Protocol):
    """A ring in one direction. One thread owns it."""

    entries: int
    """How many operations it takes at a time."""
    memory: memoryview
    """Its own memory, aligned for direct I/O. What lies there is the caller's between operations."""
    any_memory: bool
    """Whether operations may be on any memory, in several pieces."""

    @property
    def pending(self) -> int:
        """How many operations were prepared and have not come back from `wait`."""
        ...

    def prepare(self, views: Sequence[memoryview], fd: int, offset: int, token: int) -> None:
        """Add one operation between `views`, one after the other, and the file from `offset`.

        The views belong to the ring until the operation has ended. Without `any_memory` there is
        exactly one, and it lies in `memory`. Raises OSError: EAGAIN if the ring is full, EBADF if
        `fd` is not registered, EINVAL for views that it does not take.
        """
        ...

    def submit(self) -> None:
        """Let everything that was prepared begin. Raises OSError."""
        ...

    def wait(self, least: int, deadline: float) -> list[Completion]:
        """Return what has ended, as soon as that are `least`, or what there is at the deadline.

        `deadline` is on `time.monotonic`'s scale. Only submitted operations are sure to end. Raises
        OSError where the ring itself fails.
        """
        ...

    def drain(self, deadline: float) -> bool:
        """Forget all operations; say whether by the deadline nothing touches any view any more.

        For a ring on any memory that is so at once: it must never touch a caller's buffer later.
        Another one may be used again only once it has said so.
        """
        ...

    def close(self) -> None:
        """Give its memory back. Idempotent."""
        ...


class RingClient(Protocol):
    """Makes rings for the files of one filesystem, and knows which files those may touch."""

    text: str
    """What it is, for a log line."""

    def ring(self, *, reads: bool, entries: int, memory_bytes: int) -> Ring:
        """Return a new ring; `memory_bytes` is a multiple of 4096. Raises OSError."""
        ...

    @property
    def any_memory(self) -> bool:
        """Whether its rings take any memory."""
        ...

    def register(self, fd: int) -> None:
        """Let rings use this descriptor. Raises OSError, EINVAL if it is registered."""
        ...

    def deregister(self, fd: int) -> None:
        """Forget this descriptor, which is still open. No operation on it may be pending."""
        ...
