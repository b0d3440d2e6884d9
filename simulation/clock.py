"""Virtual time: only the schedule moves it, and everything that is due happens in one order.

Events that are due at the same instant happen in the order in which they were planned. So a schedule
depends on its seed and on nothing else.
"""

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]
"""What happens at a planned instant."""


class VirtualClock:
    """The one clock of a schedule, in microseconds since its start."""

    def __init__(self) -> None:
        self.now_us = 0
        self._planned: list[tuple[int, int, Action]] = []
        self._sequence = 0

    def after(self, delay_us: int, action: Action) -> None:
        """Plan `action` for `delay_us` from now; it happens when the clock is advanced that far."""
        self._sequence += 1
        heappush(self._planned, (self.now_us + max(0, delay_us), self._sequence, action))

    def advance(self, duration_us: int) -> None:
        """Let `duration_us` pass; what is planned within it happens at its instant."""
        end_us = self.now_us + duration_us
        planned = self._planned
        while planned and planned[0][0] <= end_us:
            instant_us, _, action = heappop(planned)
            self.now_us = instant_us
            action()
        self.now_us = end_us

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
