"""Turns among the processes of a store: one at a time moves or replaces a file that has a name.

To publish a file under a free name needs no turn, since the kernel lets exactly one do it. To take a
bad file away, or to put a fuller object in the place of one, is to look and then to act: whoever does
it holds a lock, and acts only on the very file that it has looked at.
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
"""What `flock` answers where there are no locks. EBADF is the answer of a network filesystem that
has none for what is open for reading only."""
_TIMEOUT_S: Final = 1.0
_RETRY_S: Final = 0.001

Identity = tuple[int, int]
"""Device and inode of a file that is still open, so that the number cannot be reused."""


class Lock(Enum):
    """What became of an attempt to lock a file."""

    OURS = 0
    TAKEN = 1
    UNKNOWN = 2
    """The filesystem has no locks."""


def try_to_lock(fd: int) -> Lock:
    """Lock an open file, without a wait. The kernel gives the lock back when its holder dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return Lock.UNKNOWN
    return Lock.OURS


class Turns:
    """The turns of one store, whose lock is on a directory. Thread-safe."""

    def __init__(self, root_fd: int, directory: str) -> None:
        self._root_fd = root_fd
        self._directory = directory

    @contextmanager
    def on(self, path: str, identity: Identity | None, stop: Stop | None = None) -> Generator[bool]:
        """Wait for a turn, and say whether the file at `path` still has this identity.

        None stands for something that is no regular file. Raises OSError if the turn does not come in
        time, or before `stop` is due, or if the path cannot be looked at.
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

    Where the filesystem has none, the time between look and act is anybody's. What slips through is a
    good file in quarantine, or columns that get lost: a miss, never wrong data.
    """
    give_up = time.monotonic() + _TIMEOUT_S
    while try_to_lock(fd) is Lock.TAKEN:
        if time.monotonic() >= give_up or (stop is not None and stop.due()):
            raise TimeoutError(errno.ETIMEDOUT, "others hold the lock of the store")
        time.sleep(_RETRY_S)
