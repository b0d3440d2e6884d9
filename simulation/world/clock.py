"""Virtual time, which only the schedule moves; all planned events happen in one order.

Events planned for the same instant happen in the order in which they were planned. A schedule therefore
depends on its seed only.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

Action = Callable[[], object]
"""The callback of a planned event."""


class VirtualClock:
    """The clock of one group, in microseconds since its start."""

    def __init__(self) -> None:
        self.now_us = 0
        self.beside: VirtualClock | None = None
        """The clock of the other group of a pair, which advances together with this clock; None without
        a pair."""
        self._planned: list[tuple[int, int, Action]] = []
        self._sequence = 0

    def after(self, delay_us: int, action: Action) -> None:
        """Plan `action` for `delay_us` from now; it runs when the clock reaches that time."""
        self._sequence += 1
        heappush(self._planned, (self.now_us + max(0, delay_us), self._sequence, action))

    def advance(self, duration_us: int) -> None:
        """Advance by `duration_us`, and run the due events of this and the other group's clock."""
        end_us = self.now_us + duration_us
        clocks = (self,) if self.beside is None else (self, self.beside)
        while True:
            first = min(clocks, key=VirtualClock.wait_us)
            wait_us, left_us = first.wait_us(), end_us - self.now_us
            for each in clocks:
                each.now_us += int(min(wait_us, left_us))
            if wait_us > left_us:
                return
            first.happen()

    def wait_us(self) -> float:
        """Return the time in microseconds until this clock's next planned event."""
        return self._planned[0][0] - self.now_us if self._planned else inf

    def happen(self) -> None:
        """Run this clock's next planned event."""
        _, _, action = heappop(self._planned)
        action()

    def advance_to_next(self, duration_us_max: int) -> None:
        """Advance to this clock's next planned event, but by at most `duration_us_max`."""
        if self._planned:
            until_us = self._planned[0][0] - self.now_us
            self.advance(min(max(0, until_us), duration_us_max))
        else:
            self.advance(duration_us_max)

    def forget_plans(self) -> None:
        """Drop all planned events, because every process of the group has ended."""
        self._planned.clear()


class RankClock:
    """The clock of one rank: the group's clock plus an offset; it may leap ahead or stand still."""

    def __init__(self, clock: VirtualClock, ahead_ms: int) -> None:
        self._clock = clock
        self._ahead_us = ahead_ms * 1000
        self._stands_until_us = 0

    def now_ms(self) -> int:
        """Return the rank's time in milliseconds; it never decreases."""
        return (max(self._clock.now_us, self._stands_until_us) + self._ahead_us) // 1000

    def leap(self, by_ms: int) -> None:
        """Move this rank's clock ahead by `by_ms`."""
        self._ahead_us += by_ms * 1000

    def stand_still(self, for_ms: int) -> None:
        """Stop this rank's clock for `for_ms`; afterwards it stays behind by this time."""
        from_us = max(self._clock.now_us, self._stands_until_us)
        self._stands_until_us = from_us + for_ms * 1000
        self._ahead_us -= for_ms * 1000
