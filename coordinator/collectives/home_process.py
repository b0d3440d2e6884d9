"""The process that made an object, told apart from the processes that were forked from it.

A forked child has a copy of its parent's memory, shares its files, its sockets and what it shares with
other ranks, and has none of its threads. So what a child did with a transport or a cache that it has
inherited would be done to the parent's group, and a wait for one of their threads would never end.
"""

import os

from ...errors import UsageError

_forks = 0
"""How many forks lie between this process and the one that imported this module."""


def _count_fork() -> None:
    global _forks  # noqa: PLW0603 - there is one process, and the system asks nobody else.
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class HomeProcess:
    """The process that has made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._forks = _forks

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and none that was forked from it. Costs no system call."""
        return _forks == self._forks

    def require_here(self) -> None:
        """Raise `UsageError` in a process that was forked."""
        if _forks != self._forks:
            raise UsageError(
                f"this process was forked from process {self._pid}, which alone has a part in its"
                " group; make no call but close here"
            )
