"""Rate-limited warnings about a store whose calls fail repeatedly; each warning states a remedy."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

SAID_AGAIN_S: Final = 60.0
"""Minimum seconds between two logged warnings of one kind. Warnings in between are only counted, and
the next logged warning states their number."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
ROOM: Final = "make room on its filesystem, or give the store a quota (quota_gib=)"
_NO_FILES: Final = "raise the limit of open files (ulimit -n)"
_NO_PERMISSION: Final = "give this process access to its directory and the files in it"
_OTHERWISE: Final = "check its filesystem"
_REMEDIES: Final = {
    errno.EFBIG: "raise the limit of the size of a file (ulimit -f), or use another filesystem",
    errno.EROFS: "mount its filesystem for writing, or open the store with read_only=1",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EIO: "check the device and the kernel's log",
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
    errno.ENOENT: "its directory is gone, so open the store again",
    errno.ESTALE: "a file or directory of it is gone on the server; if that persists, open the store"
    " again",
}

_log = logging.getLogger(__name__)


class LoggedError:
    """Logs warnings of one kind, at most once per `SAID_AGAIN_S`, and counts the suppressed ones.

    Thread-safe.
    """

    def __init__(
        self, log: logging.Logger = _log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._say_at: float | None = None
        self._unsaid = 0

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, or only count it if one was logged within `SAID_AGAIN_S`."""
        with self._lock:
            now = self._clock()
            if self._say_at is not None and now < self._say_at:
                self._unsaid += 1
                return
            self._say_at, unsaid, self._unsaid = now + SAID_AGAIN_S, self._unsaid, 0
        if unsaid:
            message += " (and %d similar warnings since the last one)"
            arguments = (*arguments, unsaid)
        self._log.warning(message, *arguments)


class ErrorLog:
    """Logs warnings about one store. Each kind of warning has its own `LoggedError`. Thread-safe.

    `store` is the store's name without secrets. `room` is the remedy in warnings that the store is
    full.
    """

    def __init__(
        self, store: str, room: str = ROOM, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._room = room
        self._clock = clock
        self._troubles: dict[str, LoggedError] = {}

    def say(self, what: str, message: str, *arguments: object) -> None:
        """Log a warning of the kind `what`, at most once per `SAID_AGAIN_S` for this kind."""
        trouble = self._troubles.setdefault(what, LoggedError(clock=self._clock))
        trouble.warn(f"store %s: {message}", self._store, *arguments)

    def log_failure(self, what: str, number: int | None) -> None:
        """Log that `what` failed, with the system's text for the errno `number` and a remedy."""
        number = number or errno.EIO
        # Log all failures of a full store as one kind of warning, because they have one cause.
        about = "room" if number in _NO_ROOM else f"{what}: {number}"
        remedy = self._room if number in _NO_ROOM else _REMEDIES.get(number, _OTHERWISE)
        self.say(about, "%s: %s; %s", what, os.strerror(number), remedy)

    def log_read_only(self) -> None:
        """Log that the store is open read-only and nothing is written to it."""
        self.say(
            "read_only",
            "it is open read-only, so nothing is written; leave out read_only=1 to store pages",
        )
