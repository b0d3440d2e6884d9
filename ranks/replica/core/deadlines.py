"""Deadlines in agreed time, which therefore pass in the same step on every rank (rule R14)."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_STALE_SPARE = 64
"""Entries that mean nothing any more and may wait beside as many as count."""


class AgreedDeadlines(Generic[T]):
    """One deadline for each of some things. A step costs what ends in it (rule R15)."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, T]] = []
        """When, the number of the entry, and whose it is, as a heap."""
        self._current: dict[T, int] = {}
        """The number of the entry that counts; 0 while no time has been agreed on."""
        self._undated: dict[T, int] = {}
        """How long those have that were set while no time had been agreed on."""
        self._number = 0

    def __len__(self) -> int:
        """Return how many entries wait, with those that mean nothing any more."""
        return len(self._entries)

    def set(self, whose: T, ttl_ms: int, now_ms: int) -> None:
        """Let a time end so long after `now_ms`, whatever was set before.

        Where no time has been agreed on (0), it runs from the first that is.
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
        """Forget a deadline, if there is one."""
        self._current.pop(whose, None)
        self._undated.pop(whose, None)
        self._forget_stale()

    def _forget_stale(self) -> None:
        if len(self._entries) > 2 * len(self._current) + _STALE_SPARE:
            current = self._current
            self._entries = [each for each in self._entries if current.get(each[2]) == each[1]]
            heapify(self._entries)

    def passed(self, now_ms: int) -> list[T]:
        """Return whose deadline has passed by now, in their order; they have none from then on."""
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
