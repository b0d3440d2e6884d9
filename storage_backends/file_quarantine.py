"""Where files go that are not what their name says: kept for inspection, never served, bounded.

The quarantine has a fixed number of places and is filled round and round; a new arrival takes the
place of an old one.
"""

import errno
import logging
import os
import secrets
from typing import Final

from .file_turns import Identity, Turns
from .page_object import Finding

QUARANTINE: Final = "quarantine"
PLACES: Final = 64
"""Entries that the quarantine keeps."""

_log = logging.getLogger(__name__)


class Quarantine:
    """The quarantine of one store. Thread-safe, and safe beside other processes."""

    def __init__(self, root_fd: int, turns: Turns) -> None:
        self._root_fd = root_fd
        self._turns = turns
        self._next = secrets.randbelow(PLACES)

    def take(self, path: str, identity: Identity | None, finding: Finding) -> bool:
        """Move what lies at `path` away; say whether it did.

        It moves exactly the file with this `identity`; with None, something that is no regular
        file. If another process has put a good file in its place meanwhile, that one stays.
        """
        try:
            with self._turns.on(path, identity) as ours:
                taken = ours and self._move(path)
        except OSError as error:
            _log.warning("object %s is bad (%s) and stays: %s", path, finding.name, error)
            return False
        if taken:
            _log.warning("object %s was bad (%s) and is in quarantine now", path, finding.name)
        return taken

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
