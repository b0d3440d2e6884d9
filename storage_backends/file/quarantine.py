"""Where files go that are not what their name says: kept for inspection, never served, bounded.

The quarantine has a fixed number of places. A file is put into one that is free, or else into the next
one in turn, whose content it replaces. A directory with something in it cannot be replaced at once.
Where all places have one, each file that comes removes a part of it, so that none of them waits long.
"""

import errno
import logging
import os
import secrets
from typing import Final

from ...page_format.object_header import HeaderFinding
from ..complaints import Trouble
from ..threaded_backend import Stop
from .trees import remove_tree
from .turns import Identity, Turns

QUARANTINE: Final = "quarantine"
PLACES: Final = 64
"""Entries that the quarantine keeps."""
TAKEN_APART_MAX: Final = 1024
"""What is removed for one file where all places are directories with something in them."""

_log = logging.getLogger(__name__)


class FileQuarantine:
    """The quarantine of one store. Thread-safe, and safe beside other processes."""

    def __init__(self, root_fd: int, turns: Turns) -> None:
        self._root_fd = root_fd
        self._turns = turns
        self._next = secrets.randbelow(PLACES)
        self._found = Trouble(_log)

    def put_away(
        self, path: str, identity: Identity | None, finding: HeaderFinding, stop: Stop | None = None
    ) -> bool:
        """Move what lies at `path` away; say whether it did.

        It moves exactly the file with this `identity`; with None, something that is no regular
        file. If another process has put a good file in its place meanwhile, that one stays. It does
        not wait for its turn once `stop` is due.
        """
        try:
            with self._turns.on(path, identity, stop) as ours:
                moved = ours and self._move(path)
        except OSError as error:
            self._found.warn("object %s is bad (%s) and stays: %s", path, finding.name, error)
            return False
        if moved:
            self._found.warn("object %s was bad (%s) and is in quarantine now", path, finding.name)
        return moved

    def _move(self, path: str) -> bool:
        if self._move_to_a_place(path, only_free=True) or self._move_to_a_place(path):
            return True
        self._free_a_place()
        if self._move_to_a_place(path):
            return True
        # There is nowhere to keep it, and its name must be free.
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
                # A directory can take the place of an empty directory only, and a file not even of
                # that, so some places may not do for this one.
                if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return True
        return False

    def _free_a_place(self) -> None:
        """Empty the first place that permits it, as far as is done soon."""
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
