"""Attendance: ranks say that they come to a gathering, in the store in which torch lets them meet.

Gloo does not say whom it waits for, and a start that hangs because one rank of many still opens its
store, or never will, says nothing if that one is not named. So each rank leaves a note before it joins
a gathering, and whoever sees it fail reads the notes.

The store may be in a process that is stopped. Leaving a note does not wait for it to answer; reading
does, so that is done by a thread which is waited for only briefly.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

READ_S = 2.0
"""How long to wait for the notes."""


class MeetingStore(Protocol):
    """As much of `torch.distributed.Store` as is needed."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...


class Attendance:
    """The gatherings of one group, as its ranks come to them one after the other."""

    def __init__(self, store: MeetingStore, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are those of the group, and this is `rank`.

        No other group uses `store`, but one of the same ranks may have used it before.
        """
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._count = 0
        self.come()

    def come(self) -> None:
        """Leave a note that this rank comes to the next gathering, if there is still a store."""
        with suppress(RuntimeError):
            self._store.set(str(self._rank), str(self._count))
        self._count += 1

    def absent(self) -> list[int]:
        """Return the ranks that have not come to this rank's last gathering, ascending.

        Empty if the store does not answer or is gone, since nobody can tell then.
        """
        found: list[int] = []

        def read() -> None:
            try:
                found.extend(each for each in self._ranks if not self._has_come(each))
            except RuntimeError:
                found.clear()

        # A daemon, since it may never end.
        reader = threading.Thread(target=read, name="lockstep-attendance", daemon=True)
        reader.start()
        reader.join(READ_S)
        return [] if reader.is_alive() else found

    def _has_come(self, rank: int) -> bool:
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._count - 1
