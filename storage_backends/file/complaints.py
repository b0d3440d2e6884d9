"""What keeps a store from being written, said once and not with every page that is lost by it.

Each page that is not stored is counted, but a count does not say why. The reason is nearly always one
for all of them, a full disk for example, and whoever runs the store has to hear of it.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

SAID_AGAIN_S: Final = 60.0
"""Where some writes go well and others fail, as on a disk that is nearly full."""
_NO_ROOM: Final = "make room on its filesystem, or give the store a quota (quota_gib=)"
_NO_DEVICE: Final = "look at the device and the kernel's log"
_NO_FILES: Final = "raise the limit of open files (ulimit -n)"
_NO_PERMISSION: Final = "let this process write to its directory and all that is in it"
_REMEDIES: Final = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "raise the limit of the size of a file (ulimit -f), or use another filesystem",
    errno.EROFS: "mount its filesystem for writing, or open the store with read_only=1",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EIO: _NO_DEVICE,
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
    errno.ENOENT: "its directory is gone, so open the store again",
    errno.ESTALE: "its directory is gone, so open the store again",
}

_log = logging.getLogger(__name__)


def remedy_for(error: OSError, otherwise: str) -> str:
    """Return what to do about a store that cannot be written because of `error`."""
    return _REMEDIES.get(error.errno or errno.EIO, otherwise)


class WriteComplaints:
    """Says why the writes to one store fail: the first time, and again after one went well.

    Not more often than every `SAID_AGAIN_S`. `store` names it, without secrets. Thread-safe.
    """

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._silent = False
        self._said_at: float | None = None

    def went_well(self) -> None:
        """Note that a write went well. Cheap, since it comes with every page."""
        self._silent = False

    def failed(self, error: OSError) -> None:
        """Say, unless it was said, that a write failed, with the system's reason and a remedy."""
        if not self._is_due():
            return
        _log.warning(
            "store %s: a page could not be written: %s; %s",
            self._store,
            error.strerror or os.strerror(error.errno or errno.EIO),
            remedy_for(error, "look at the filesystem that it is on"),
        )

    def refused(self) -> None:
        """Say, unless it was said, that the store was opened for looking only."""
        if self._is_due():
            _log.warning(
                "store %s is read-only, and nothing is written to it; leave out read_only=1 where "
                "pages are to be stored",
                self._store,
            )

    def _is_due(self) -> bool:
        with self._lock:
            now = self._clock()
            recent = self._said_at is not None and now < self._said_at + SAID_AGAIN_S
            if self._silent or recent:
                return False
            self._silent, self._said_at = True, now
            return True
