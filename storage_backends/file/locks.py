"""Locks of files among processes, where the filesystem has any."""

import errno
import fcntl
from enum import Enum
from typing import Final

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
"""What `flock` answers where there are no locks. EBADF is the answer of a network filesystem that
has none for what is open for reading only."""


class Lock(Enum):
    """What became of an attempt to lock a file."""

    OURS = 0
    TAKEN = 1
    UNKNOWN = 2
    """The filesystem has no locks."""


def try_to_lock(fd: int) -> Lock:
    """Lock an open file, without a wait. The kernel gives the lock back when its holder dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return Lock.UNKNOWN
    return Lock.OURS
