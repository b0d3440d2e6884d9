"""Virtual time: only the schedule moves it, and everything that is due happens in one order.

Events that are due at the same instant happen in the order in which they were planned. So a schedule
depends on its seed and on nothing else.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

Action = Callable[[], object]
"""What happens at a planned instant."""


class VirtualClock:
    """The clock of one group, in microseconds since its start."""

    def __init__(self) -> None:
        self.now_us = 0
        self.beside: VirtualClock | None = None
        """The clock of a group that runs side by side with this one, for which as much time passes."""
        self._planned: list[tuple[int, int, Action]] = []
        self._sequence = 0

    def after(self, delay_us: int, action: Action) -> None:
        """Plan `action` for `delay_us` from now; it happens when the clock is advanced that far."""
        self._sequence += 1
        heappush(self._planned, (self.now_us + max(0, delay_us), self._sequence, action))

    def advance(self, duration_us: int) -> None:
        """Let `duration_us` pass; what is planned within it happens at its instant, on either clock."""
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
        """Return how long it is until something happens that is planned here."""
        return self._planned[0][0] - self.now_us if self._planned else inf

    def happen(self) -> None:
        """Let happen what is planned first, which is due."""
        _, _, action = heappop(self._planned)
        action()

    def advance_to_next(self, duration_us_max: int) -> None:
        """Let time pass until something has happened, but no longer than `duration_us_max`."""
        if self._planned:
            until_us = self._planned[0][0] - self.now_us
            self.advance(min(max(0, until_us), duration_us_max))
        else:
            self.advance(duration_us_max)

    def forget_plans(self) -> None:
        """Drop everything that is planned, as when every process of the group has ended."""
        self._planned.clear()


class RankClock:
    """The clock of one rank: it runs ahead of the schedule's, and may leap ahead or stand still."""

    def __init__(self, clock: VirtualClock, ahead_ms: int) -> None:
        self._clock = clock
        self._ahead_us = ahead_ms * 1000
        self._stands_until_us = 0

    def now_ms(self) -> int:
        """Return the time, which never goes back."""
        return (max(self._clock.now_us, self._stands_until_us) + self._ahead_us) // 1000

    def leap(self, by_ms: int) -> None:
        """Jump ahead by so much."""
        self._ahead_us += by_ms * 1000

    def stand_still(self, for_ms: int) -> None:
        """Stop for so long, and go on from the time at which it stopped."""
        from_us = max(self._clock.now_us, self._stands_until_us)
        self._stands_until_us = from_us + for_ms * 1000
        self._ahead_us -= for_ms * 1000
