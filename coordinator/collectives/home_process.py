"""The process that made an object, told apart from the processes that were forked from it.

A forked child has a copy of its parent's memory, shares its files, its sockets and what it shares with
other ranks, and has none of its threads. So what a child did with a transport or a cache that it has
inherited would be done to the parent's group, and a wait for one of their threads would never end.
"""

import os

from ...errors import UsageError


class HomeProcess:
    """The process that has made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and none that was forked from it."""
        return os.getpid() == self._pid

    def require_here(self) -> None:
        """Raise `UsageError` in a process that was forked."""
        if not self.is_here:
            raise UsageError(
                f"this process was forked from process {self._pid}, which alone has a part in its"
                " group; make no call but close here"
            )
