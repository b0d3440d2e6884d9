"""What is said of a trouble that costs key after key: how often, and what to do about it."""

import errno
import threading
import time
from collections.abc import Callable
from typing import Final

SAID_AGAIN_S: Final = 60.0
"""Where some writes go well and others fail, as on a disk that is nearly full."""
_NO_ROOM: Final = "make room on its filesystem, or give the store a quota (quota_gib=)"
_NO_FILES: Final = "raise the limit of open files (ulimit -n)"
_NO_PERMISSION: Final = "let this process write to its directory and all that is in it"
_GONE: Final = "its directory is gone, so open the store again"
_REMEDIES: Final = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "raise the limit of the size of a file (ulimit -f), or use another filesystem",
    errno.EROFS: "mount its filesystem for writing, or open the store with read_only=1",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EIO: "look at the device and the kernel's log",
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
    errno.ENOENT: _GONE,
    errno.ESTALE: _GONE,
}


def remedy_for(number: int | None, otherwise: str = "look at the filesystem that it is on") -> str:
    """Return what to do about a directory that cannot be used because of this errno."""
    return _REMEDIES.get(number or errno.EIO, otherwise)


class Trouble:
    """Tells when to say that something fails: the first time, and again after it went well.

    Not more often than every `SAID_AGAIN_S`. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._was_said = False
        self._said_at: float | None = None

    def went_well(self) -> None:
        """Note that nothing failed. Cheap, since it comes with every key."""
        self._was_said = False

    def is_to_be_said(self) -> bool:
        """Say whether to say now that something failed; whoever hears True does it."""
        with self._lock:
            now = self._clock()
            recent = self._said_at is not None and now < self._said_at + SAID_AGAIN_S
            if self._was_said or recent:
                return False
            self._was_said, self._said_at = True, now
            return True
