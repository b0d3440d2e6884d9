"""Detects whether code runs in the process that created an object or in a fork of that process.

A forked child inherits memory, files and sockets, but no threads. An inherited transport or cache would
act on the parent's group, and a wait for one of the parent's threads would never return.
"""

import os

from ...errors import UsageError

_forks = 0
"""The number of forks between the process that imported this module and this process."""


def _count_fork() -> None:
    global _forks  # noqa: PLW0603 - there is one process, and the system asks nobody else.
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class HomeProcess:
    """Remembers which process created an object, to detect its use in a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._forks = _forks

    @property
    def is_here(self) -> bool:
        """Whether the current process created this object. Makes no system call."""
        return _forks == self._forks

    def require_here(self) -> None:
        """Raise `UsageError` in a forked process."""
        if _forks != self._forks:
            raise UsageError(
                f"this process was forked from process {self._pid}, and only that process is in the"
                " group; call only close here"
            )
