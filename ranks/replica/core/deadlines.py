"""Deadlines in agreed time, so that each deadline passes in the same step on every rank (rule R14)."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_STALE_SPARE = 64
"""The heap is compacted when it has this many more superseded entries than current ones."""


class AgreedDeadlines(Generic[T]):
    """A set of deadlines, at most one per key.

    The cost of a step is proportional to the number of deadlines that pass in it (rule R15).
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, T]] = []
        """A heap of (deadline in ms, entry number, key)."""
        self._current: dict[T, int] = {}
        """By key: the number of the heap entry that has the key's deadline. The number is 0 while the
        ranks have not agreed on a time, because the key then has no heap entry."""
        self._undated: dict[T, int] = {}
        """By key: the duration (ms) of a deadline that was set before the ranks agreed on a time. The
        duration starts at the first agreed time."""
        self._number = 0

    def __len__(self) -> int:
        """Return the number of entries in the heap, including superseded ones."""
        return len(self._entries)

    def set(self, whose: T, ttl_ms: int, now_ms: int) -> None:
        """Set the deadline of the key `whose` to `now_ms + ttl_ms`, replacing an earlier deadline.

        If `now_ms` is 0 (the ranks have not agreed on a time yet), the duration starts at the first
        agreed time.
        """
        if not now_ms:
            self._undated[whose] = ttl_ms
            self._current[whose] = 0
            return
        self._number += 1
        self._current[whose] = self._number
        heappush(self._entries, (now_ms + ttl_ms, self._number, whose))
        self._forget_stale()

    def drop(self, whose: T) -> None:
        """Remove the deadline of the key `whose`, if it has one."""
        self._current.pop(whose, None)
        self._undated.pop(whose, None)
        self._forget_stale()

    def _forget_stale(self) -> None:
        if len(self._entries) > 2 * len(self._current) + _STALE_SPARE:
            current = self._current
            self._entries = [each for each in self._entries if current.get(each[2]) == each[1]]
            heapify(self._entries)

    def passed(self, now_ms: int) -> list[T]:
        """Remove and return the keys whose deadline has passed at `now_ms`, earliest first."""
        if self._undated and now_ms:
            undated, self._undated = self._undated, {}
            for whose, ttl_ms in undated.items():
                self.set(whose, ttl_ms, now_ms)
        over: list[T] = []
        while self._entries and self._entries[0][0] <= now_ms:
            _, number, whose = heappop(self._entries)
            if self._current.get(whose) == number:
                del self._current[whose]
                over.append(whose)
        return over
