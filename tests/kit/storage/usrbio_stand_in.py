"""A substitute for `hf3fs_fuse.io` that uses system calls; the real module needs a mounted 3FS.

It enforces the rules that callers break most easily: each I/O uses one slice of one iovec, a ring
either reads or writes, and a descriptor is registered once. I/Os complete in any order, but only after
their submission, and not while the `gate` is closed.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lockstep.storage_backends.three_fs.usrbio import SharedSegment


class Slice:
    """A slice of an iovec, with the result of the I/O that uses it."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.result = 0
        self.userdata: Any = None


class Iovec:
    """Shared memory for the I/O of a ring."""

    def __init__(self, shared: SharedSegment, forget: Callable[[], None]) -> None:
        self._shared = shared
        self._forget = forget

    def __getitem__(self, part: slice) -> Slice:
        if part.step not in (None, 1):
            raise ValueError("step not 1 when slicing iovec")
        return Slice(self._shared.buf[part])

    def __del__(self) -> None:
        self._forget()


class Ioring:
    """A ring that does the I/O of each submission in a separate thread."""

    def __init__(self, client: "UsrbioStandIn", entries: int, *, for_read: bool) -> None:
        self._client = client
        self._entries = entries
        self._for_read = for_read
        self._changed = threading.Condition()
        self._prepared: list[tuple[Slice, int, int]] = []
        self._ended: list[Slice] = []
        self._busy = 0

    def prepare(self, iov: Slice, read: bool, fd: int, off: int, userdata: Any = None) -> "Ioring":
        if read is not self._for_read:
            raise OSError(errno.EINVAL, "the ring goes the other way")
        if fd not in self._client.registered:
            raise OSError(errno.EBADF, "not registered")
        with self._changed:
            if len(self._prepared) + len(self._ended) + self._busy >= self._entries:
                raise OSError(errno.EAGAIN, "the ring is full")
            iov.userdata = userdata
            self._prepared.append((iov, fd, off))
        return self

    def submit(self) -> "Ioring":
        with self._changed:
            operations, self._prepared = self._prepared, []
            self._busy += len(operations)
        if operations:
            self._client.work(lambda: self._do(operations))
        return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None
    ) -> list[Slice]:
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        with self._changed:
            while len(self._ended) < min_results:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            count = max(max_results, min_results, 1)
            completed, self._ended = self._ended[:count], self._ended[count:]
        if not completed and min_results:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return completed

    def _do(self, operations: list[tuple[Slice, int, int]]) -> None:
        move = os.preadv if self._for_read else os.pwritev
        for iov, fd, offset in reversed(operations):
            self._client.begun.set()
            self._client.gate.wait()
            try:
                iov.result = move(fd, [iov.memory], offset)
            except OSError as error:
                iov.result = -(error.errno or errno.EIO)
            iov.memory.release()
            with self._changed:
                self._busy -= 1
                self._ended.append(iov)
                self._changed.notify_all()


class UsrbioStandIn:
    """The functions of the substitute module. I/O waits at the event `gate` until the event is set.

    Every I/O sets the event `begun` when it reaches the gate.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.registered: set[int] = set()
        self.iovecs = 0
        self._working: list[threading.Thread] = []

    def work(self, operations: Callable[[], None]) -> None:
        self._working.append(threading.Thread(target=operations, daemon=True))
        self._working[-1].start()

    def finish(self) -> None:
        """Open the gate and wait until all submitted I/O has completed."""
        self.gate.set()
        for each in self._working:
            each.join(60)

    def make_iovec(
        self, shm: SharedSegment, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Iovec:
        self.iovecs += 1
        return Iovec(shm, self._forget)

    def make_ioring(
        self, hf3fs_mount_point: str, entries: int, for_read: bool = True, io_depth: int = 0
    ) -> Ioring:
        return Ioring(self, entries, for_read=for_read)

    def register_fd(self, fd: int) -> None:
        if fd in self.registered:
            raise OSError(errno.EINVAL, "registered already")
        os.fstat(fd)
        self.registered.add(fd)

    def deregister_fd(self, fd: int) -> None:
        # Fail if the file is closed, because callers must deregister a file before they close it.
        os.fstat(fd)
        self.registered.remove(fd)

    def extract_mount_point(self, path: str) -> str | None:
        return path if path.startswith("/mnt/3fs") else None

    def _forget(self) -> None:
        self.iovecs -= 1
