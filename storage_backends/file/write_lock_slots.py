"""The write lock of a `file://` store: one process at a time moves or replaces a published file.

Publishing a file under a free name needs no lock, because the kernel lets only one writer succeed. A
process checks a file before it removes or replaces it. The process holds the lock from the check to the
end of the action, and acts only on the file that it has checked.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from typing import Final

from ..threaded_backend import Stop

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
"""The errors of `flock` on a filesystem without locks. A network filesystem returns EBADF if it cannot
lock a file opened read-only."""
_TIMEOUT_S: Final = 1.0
_RETRY_S: Final = 0.001

Identity = tuple[int, int]
"""(device, inode number) of a file. The file must stay open, so that no new file gets the inode number.
"""


class Lock(Enum):
    """The result of an attempt to lock a file."""

    OURS = 0
    TAKEN = 1
    UNKNOWN = 2
    """The filesystem has no locks, so another process may be working on the file."""


def try_to_lock(fd: int) -> Lock:
    """Try once to lock an open file. The kernel releases the lock when its holder dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return Lock.UNKNOWN
    return Lock.OURS


class WriteLockSlots:
    """The write lock of one store: a file lock on one of its directories. Thread-safe."""

    def __init__(self, root_fd: int, directory: str) -> None:
        self._root_fd = root_fd
        self._directory = directory

    @contextmanager
    def on(self, path: str, identity: Identity | None, stop: Stop | None = None) -> Generator[bool]:
        """Hold the lock during the block; yield whether `path` is still as the caller has checked it.

        The file at `path` must still have `identity`. If `identity` is None, `path` must not be a
        regular file. Raises OSError if the path cannot be checked, or if the lock stays taken until the
        timeout or until `stop` is due.
        """
        fd = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root_fd)
        try:
            _lock(fd, stop)
            yield self._is_still(path, identity)
        finally:
            os.close(fd)

    def _is_still(self, path: str, identity: Identity | None) -> bool:
        try:
            status = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if identity is None:
            return not stat.S_ISREG(status.st_mode)
        return (status.st_dev, status.st_ino) == identity


def _lock(fd: int, stop: Stop | None) -> None:
    """Wait for the lock.

    On a filesystem without locks, another process may act between this one's check and action. The
    worst result is a good file in the quarantine directory or lost columns: a miss, never wrong data.
    """
    give_up = time.monotonic() + _TIMEOUT_S
    while try_to_lock(fd) is Lock.TAKEN:
        if time.monotonic() >= give_up or (stop is not None and stop.due()):
            raise TimeoutError(errno.ETIMEDOUT, "other processes hold the write lock of the store")
        time.sleep(_RETRY_S)
