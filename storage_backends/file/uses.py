"""Keeps the time of last use of each object in its file's mtime, so that sweeps evict leaves first.

A reader finds a page only after all pages before it in the prefix, so a sweep must remove leaves before
roots. Therefore a file never has a later mtime than its predecessor's file. The files of one call get
descending mtimes. The first file's mtime is just below the mtime of its predecessor's file, or is now
if the predecessor has no file.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ...page_format.object_name import ObjectName, located
from ..base import After

STEP_NS: Final = 1000
"""Nanoseconds by which a file's mtime is below its predecessor's. Filesystems must store mtimes with at
least this precision."""


class UseTimes:
    """Sets the mtimes of the files of one call, by their position in the call. Thread-safe."""

    def __init__(self, root_fd: int, after: After | None = None) -> None:
        """`after` is the predecessor of the first object of the call, if it has one."""
        self._root_fd = root_fd
        self._after = after
        self._lock = threading.Lock()
        self._first_ns: int | None = None

    def mark(self, first: int, names: Sequence[ObjectName | None]) -> None:
        """Set the mtimes of consecutive files of the call; the first has position `first` in the call.

        A position whose name is None is skipped. A file that does not exist or belongs to another user
        is skipped too.
        """
        for position, name in enumerate(names, start=first):
            place = None if name is None else located(name)
            if place is None:
                continue
            with suppress(OSError):
                at_ns = self._begin(place[1]) - position * STEP_NS
                os.utime(place[1], ns=(at_ns, at_ns), dir_fd=self._root_fd, follow_symlinks=False)

    def _begin(self, path: str) -> int:
        """Return the mtime that the call's first file (position 0) gets, by the filesystem's clock."""
        with self._lock:
            if self._first_ns is None and self._after is not None:
                place = located(self._after.name)
                with suppress(OSError):
                    if place is not None:
                        self._first_ns = self._time_of(place[1]) - self._after.distance * STEP_NS
            if self._first_ns is None:
                os.utime(path, dir_fd=self._root_fd, follow_symlinks=False)
                self._first_ns = self._time_of(path)
            return self._first_ns

    def _time_of(self, path: str) -> int:
        return os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_mtime_ns
