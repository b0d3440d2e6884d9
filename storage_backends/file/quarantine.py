"""Keeps a bounded number of corrupt files of a store for inspection; they are never served.

A quarantine has `PLACES` numbered paths. A corrupt file moves to a free path. If none is free, it
replaces the file at the next path, in rotation. A non-empty directory cannot be replaced atomically.
Therefore, if non-empty directories occupy all paths, each move removes some of their entries. The
number of removed entries is bounded, so no move takes long.
"""

import errno
import logging
import os
import secrets
from typing import Final

from ...page_format.object_header import HeaderFinding
from ..error_log import LoggedError
from ..threaded_backend import Stop
from .trees import remove_tree
from .write_lock_slots import Identity, WriteLockSlots

QUARANTINE: Final = "quarantine"
PLACES: Final = 64
"""Number of paths in the quarantine, each for one file or directory."""
TAKEN_APART_MAX: Final = 1024
"""Maximum number of directory entries removed per move to the quarantine, if non-empty directories
occupy all its paths."""

_log = logging.getLogger(__name__)


class FileQuarantine:
    """The directory of a store's corrupt files. Threads and processes may use it concurrently."""

    def __init__(self, root_fd: int, turns: WriteLockSlots) -> None:
        self._root_fd = root_fd
        self._turns = turns
        self._next = secrets.randbelow(PLACES)
        self._found = LoggedError(_log)

    def move_to_quarantine(
        self, path: str, identity: Identity | None, finding: HeaderFinding, stop: Stop | None = None
    ) -> bool:
        """Move the file at `path` to the quarantine; return whether it was moved.

        The file is moved only if it has this `identity`. Otherwise another process may have put a
        valid file at `path` meanwhile. If `identity` is None, `path` is moved only if it is not a
        regular file. Waits for the write lock until `stop` is due.
        """
        try:
            with self._turns.on(path, identity, stop) as ours:
                moved = ours and self._move(path)
        except OSError as error:
            self._found.warn(
                "object %s is corrupt (%s) but cannot be moved to the quarantine: %s",
                path,
                finding.name,
                error,
            )
            return False
        if moved:
            self._found.warn(
                "object %s is corrupt (%s) and was moved to the quarantine", path, finding.name
            )
        return moved

    def _move(self, path: str) -> bool:
        if self._move_to_a_place(path, only_free=True) or self._move_to_a_place(path):
            return True
        self._free_a_place()
        if self._move_to_a_place(path):
            return True
        # Delete the file: it cannot be moved to the quarantine, and its name must become free.
        _drop(self._root_fd, path)
        return True

    def _move_to_a_place(self, path: str, *, only_free: bool = False) -> bool:
        for _ in range(PLACES):
            self._next = (self._next + 1) % PLACES
            place = f"{QUARANTINE}/{self._next:02x}"
            taken = os.access(place, os.F_OK, dir_fd=self._root_fd, follow_symlinks=False)
            if only_free and taken:
                continue
            try:
                os.replace(path, place, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
            except OSError as error:
                # Try the next path: a directory can replace only an empty directory, and a file cannot
                # replace a directory.
                if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return True
        return False

    def _free_a_place(self) -> None:
        """Empty one path of the quarantine, so that the next corrupt file can move there.

        Removes at most `TAKEN_APART_MAX` entries in total. A directory with more entries loses only
        some of them, and still occupies its path.
        """
        left = iter(range(TAKEN_APART_MAX))
        for number in range(self._next + 1, self._next + 1 + PLACES):
            place = f"{QUARANTINE}/{number % PLACES:02x}"
            try:
                os.unlink(place, dir_fd=self._root_fd)
            except OSError:
                if not remove_tree(
                    self._root_fd, place, go_on=lambda: next(left, None) is not None
                ):
                    continue
            return


def _drop(root_fd: int, path: str) -> None:
    """Remove a file or an empty directory."""
    try:
        os.unlink(path, dir_fd=root_fd)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        os.rmdir(path, dir_fd=root_fd)
