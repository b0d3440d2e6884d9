"""The directories that objects lie in, and whether they are the store's own."""

import os
import stat
from typing import Final

from ...page_format.object_name import NAME_DIGEST_BYTES

_NAME_CHARACTERS: Final = 1 + 2 * NAME_DIGEST_BYTES
"""Of a file, with the separator before it."""
_REAL_MAX: Final = 1 << 16
"""Directories that are known to be no links."""


class OwnDirectories:
    """Knows which directories were seen to be no links out of the store. Thread-safe.

    They are looked at when they are first used, not each time: the links are those of somebody who
    tidies up, since whoever means harm may write to the objects themselves.
    """

    def __init__(self) -> None:
        self._real: set[str] = set()

    def foreign(self, root_fd: int, path: str) -> str | None:
        """Return which of the directories on an object's path is no directory, if any is not."""
        directory = path[:-_NAME_CHARACTERS]
        if directory in self._real:
            return None
        for each in (directory[: directory.rindex("/")], directory):
            try:
                status = os.stat(each, dir_fd=root_fd, follow_symlinks=False)
            except OSError:
                return None
            if not stat.S_ISDIR(status.st_mode):
                return each
        if len(self._real) >= _REAL_MAX:
            self._real.clear()
        self._real.add(directory)
        return None
