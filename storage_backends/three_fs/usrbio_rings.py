"""Rings of 3FS itself: USRBIO, through the client that a 3FS cluster installs on its nodes.

The client (`hf3fs_fuse.io` over the extension `hf3fs_py_usrbio`) is built with 3FS and is on no
package index, so it is imported only where it is there. Operations are on shared memory that the
3FS daemon of the node has mapped too, so payloads are copied between it and the caller's buffers.

What its interface leaves to its user is kept here: slices of the shared memory are of step one and
lie in one block (block_size is 0, so that all of it is one); a descriptor is deregistered before it
is closed, or I/O would go to the file that it was; a wait for more than was submitted would hang,
so none asks for that; and what was submitted cannot be called back, so a ring that was given up is
used again only once everything in it has ended.
"""

import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, cast

from ..addresses import address_of
from .rings import Completion

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where the daemon looks for shared memory.
_TIMED_OUT: Final = frozenset({errno.ETIMEDOUT, errno.EAGAIN})
"""What a wait raises when its time is over and nothing has ended."""


class SharedSegment:
    """Shared memory by a name, as the client wants it: it asks for `name` and `buf` and no more.

    The class of the standard library complains when it is forgotten while there is still a view of
    it; here the memory just stays for as long as the last view.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = f"lockstep-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(_SHARED / self.name, flags, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            self.buf = memoryview(mmap.mmap(fd, nbytes))
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Take the name away; the memory goes when nobody has it mapped. Idempotent."""
        with suppress(FileNotFoundError):
            (_SHARED / self.name).unlink()


class UsrbioClient(Protocol):
    """What this module uses of `hf3fs_fuse.io`."""

    def make_iovec(
        self, shm: "SharedSegment", hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Any: ...

    def make_ioring(
        self, hf3fs_mount_point: str, entries: int, for_read: bool = True, io_depth: int = 0
    ) -> Any: ...

    def register_fd(self, fd: int) -> None: ...

    def deregister_fd(self, fd: int) -> None: ...

    def extract_mount_point(self, path: str) -> str | None: ...


def load_client() -> UsrbioClient | None:
    """Return the client, or None where it is not installed or cannot be loaded."""
    try:
        return cast(UsrbioClient, import_module("hf3fs_fuse.io"))
    except (ImportError, OSError):
        return None


def find_mount(client: UsrbioClient, directory: Path) -> str | None:
    """Return the mount point of the 3FS that `directory` is on, or None if it is on none."""
    try:
        return client.extract_mount_point(str(directory))
    except OSError:
        return None


class UsrbioRings:
    """Makes rings on one mounted 3FS; see `RingClient`. Thread-safe."""

    def __init__(self, client: UsrbioClient, mount: str) -> None:
        self.text = f"USRBIO rings on {mount}"
        self._client = client
        self._mount = mount
        self._lock = threading.Lock()
        self._registered: set[int] = set()

    @property
    def any_memory(self) -> bool:
        """See `RingClient`."""
        return False

    def ring(self, *, reads: bool, entries: int, memory_bytes: int) -> "UsrbioRing":
        """Return a new ring with shared memory of its own."""
        shared = SharedSegment(memory_bytes)
        try:
            iovec = self._client.make_iovec(shared, self._mount)
            ring = self._client.make_ioring(self._mount, entries, for_read=reads, io_depth=0)
        except BaseException:
            shared.unlink()
            raise
        return UsrbioRing(self, shared, iovec, ring, reads=reads, entries=entries)

    def register(self, fd: int) -> None:
        """Let rings use this descriptor."""
        with self._lock:
            self._client.register_fd(fd)
            self._registered.add(fd)

    def deregister(self, fd: int) -> None:
        """Forget this descriptor."""
        with self._lock:
            if fd in self._registered:
                self._registered.remove(fd)
                self._client.deregister_fd(fd)

    def knows(self, fd: int) -> bool:
        """Say whether the descriptor is registered."""
        return fd in self._registered


class UsrbioRing:
    """One ring; see `Ring`."""

    any_memory = False

    def __init__(
        self,
        client: UsrbioRings,
        shared: SharedSegment,
        iovec: Any,
        ring: Any,
        *,
        reads: bool,
        entries: int,
    ) -> None:
        self.entries = entries
        self.memory = shared.buf
        self._client = client
        self._shared: SharedSegment | None = shared
        self._iovec: Any = iovec
        self._ring: Any = ring
        self._reads = reads
        self._address = address_of(self.memory)
        self._prepared = 0
        self._submitted = 0

    @property
    def pending(self) -> int:
        """See `Ring`."""
        return self._prepared + self._submitted

    def prepare(self, views: Sequence[memoryview], fd: int, offset: int, token: int) -> None:
        """Add one operation; see `Ring`."""
        if self.pending >= self.entries:
            raise OSError(errno.EAGAIN, f"the ring has {self.entries} operations already")
        if not self._client.knows(fd):
            raise OSError(errno.EBADF, f"descriptor {fd} is not registered")
        if len(views) != 1:
            raise OSError(errno.EINVAL, f"an operation is on one piece of memory, not {len(views)}")
        start = address_of(views[0]) - self._address
        end = start + len(views[0])
        if not 0 <= start < end <= len(self.memory):
            raise OSError(errno.EINVAL, "an operation must be on the ring's own memory")
        self._ring.prepare(self._iovec[start:end], self._reads, fd, offset, userdata=token)
        self._prepared += 1

    def submit(self) -> None:
        """Tell the daemon that there is something to do."""
        self._ring.submit()
        self._submitted += self._prepared
        self._prepared = 0

    def wait(self, least: int, deadline: float) -> list[Completion]:
        """Return what has ended; see `Ring`."""
        # Without a submit, what was prepared need not ever end.
        least = min(least, self._submitted)
        if not least:
            return []
        left_s = max(0.0, deadline - time.monotonic())
        try:
            done = self._ring.wait(
                max_results=self.pending, min_results=least, timeout=timedelta(seconds=left_s)
            )
        except OSError as error:
            if error.errno in _TIMED_OUT or time.monotonic() >= deadline:
                return []
            raise
        ended = [Completion(int(each.userdata), int(each.result)) for each in done]
        # What was only prepared may have begun, and ended, as well.
        early = max(0, len(ended) - self._submitted)
        self._submitted -= len(ended) - early
        self._prepared -= early
        return ended

    def drain(self, deadline: float) -> bool:
        """Wait until all operations have ended; see `Ring`."""
        try:
            if self._prepared:
                self.submit()
            while self.pending and time.monotonic() < deadline:
                self.wait(self.pending, deadline)
        except OSError:
            return False
        return not self.pending

    def close(self) -> None:
        """Give the memory back; the daemon keeps its own hold on it while it needs that."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        self.memory = memoryview(b"")
        # The client takes away its link to the memory, and then the ring, when they are forgotten.
        with suppress(OSError):
            self._ring = None
            self._iovec = None
        shared.unlink()
