"""What is wrong with a `3fs://` store, said once and not with every call that suffers from it."""

import errno
import logging
import os
from typing import Final

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_PERMISSION: Final = "let this process read and write all that is in the store's directory"
_NO_FILES: Final = "raise the limit of open files (ulimit -n)"
_REMEDIES: Final = {
    errno.EROFS: "mount its filesystem for writing",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EIO: "look at the device and the kernel's log",
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
}
"""For reads as well as writes, so they are other ones than those of a directory that is written to."""

_log = logging.getLogger(__name__)


class Complaints:
    """Says each thing once, so that what is wrong with a store does not fill the log. Thread-safe.

    `store` names the store in all that is said, without secrets.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._said: set[str] = set()

    def say(self, what: str, message: str, *arguments: object) -> None:
        """Log a warning, the first time that it is about `what`."""
        if what not in self._said:
            self._said.add(what)
            _log.warning(f"store %s: {message}", self._store, *arguments)

    def say_failed(self, what: str, number: int | None) -> None:
        """Log that something failed with this errno, and what to do about it where that is known."""
        number = number or errno.EIO
        reason = os.strerror(number)
        if number in _NO_ROOM:
            # All files of a store that has no room fail for this same reason.
            self.say(
                "room",
                "%s: %s; pages are not stored: give the store more room, or a new directory and a new "
                "index with fewer slots: files= times file_slots= times slot_bytes= is what it takes",
                what,
                reason,
            )
            return
        remedy = _REMEDIES.get(number, "look at the filesystem that it is on")
        self.say(f"{what}: {reason}", "%s: %s; %s", what, reason, remedy)
