"""Where files go that are not what their name says: kept for inspection, never served, bounded.

The quarantine has a fixed number of places and is filled round and round; a new arrival takes the
place of an old one.
"""

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from typing import Final

from .file_publish import NO_LOCKS
from .page_object import Finding

QUARANTINE: Final = "quarantine"
PLACES: Final = 64
"""Entries that the quarantine keeps."""
_LOCK_TIMEOUT_S: Final = 1.0
_LOCK_RETRY_S: Final = 0.001

_log = logging.getLogger(__name__)

Identity = tuple[int, int]
"""Device and inode of a file that is still open, so that the number cannot be reused."""


class Quarantine:
    """The quarantine of one store. Thread-safe, and safe beside other processes."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._next = secrets.randbelow(PLACES)

    def take(self, path: str, identity: Identity | None, finding: Finding) -> bool:
        """Move what lies at `path` away; say whether it did.

        It moves exactly the file with this `identity`; with None, something that is no regular
        file. If another process has put a good file in its place meanwhile, that one stays: those
        who take files away do it one at a time, under a lock.
        """
        try:
            lock_fd = os.open(QUARANTINE, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root_fd)
            try:
                taken = _locked(lock_fd) and self._is_still(path, identity) and self._move(path)
            finally:
                os.close(lock_fd)
        except OSError as error:
            _log.warning("object %s is bad (%s) and stays: %s", path, finding.name, error)
            return False
        if taken:
            _log.warning("object %s was bad (%s) and is in quarantine now", path, finding.name)
        return taken

    def _is_still(self, path: str, identity: Identity | None) -> bool:
        try:
            status = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if identity is None:
            return not stat.S_ISREG(status.st_mode)
        return (status.st_dev, status.st_ino) == identity

    def _move(self, path: str) -> bool:
        error: OSError | None = None
        for _ in range(PLACES):
            self._next = (self._next + 1) % PLACES
            place = f"{QUARANTINE}/{self._next:02x}"
            try:
                os.replace(path, place, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
            except OSError as caught:
                # A directory can take the place of an empty directory only, and a file not even of
                # that, so some places may be of no use to this arrival.
                if caught.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                error = caught
            else:
                return True
        raise error if error is not None else OSError(errno.ENOSPC, "the quarantine is full")


def _locked(fd: int) -> bool:
    give_up = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(_LOCK_RETRY_S)
        except OSError as error:
            # Without locks on this filesystem the window between check and move stays open; what
            # slips through is a good file in quarantine, which is a miss and never wrong data.
            return error.errno in NO_LOCKS
        else:
            return True
