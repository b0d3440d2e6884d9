"""The deadlines of operations in flight, kept by the engine's thread and by no timer.

They matter when progress is asked for, so that is when they are looked at. A store that blocks its
event loop, or a device that hangs, can therefore not keep a deadline from being seen.
"""

from collections.abc import Callable
from heapq import heappop, heappush


class Deadlines:
    """One deadline for each operation; a new one replaces the old one. Seconds on any one scale."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[float, int]] = {}
        self._order: list[tuple[float, int, int]] = []
        """(deadline, serial, operation); those that were replaced or dropped are skipped."""
        self._serial = 0

    def put(self, operation: int, deadline: float) -> None:
        """Give `operation` this deadline and no other."""
        self._serial += 1
        self._at[operation] = (deadline, self._serial)
        heappush(self._order, (deadline, self._serial, operation))

    def drop(self, operation: int) -> None:
        """Forget the deadline of `operation`, if it has one."""
        self._at.pop(operation, None)

    def has(self, operation: int) -> bool:
        """Say whether `operation` has a deadline that has not passed."""
        return operation in self._at

    def next(self) -> float | None:
        """Return the earliest deadline, or None."""
        while self._order:
            deadline, serial, operation = self._order[0]
            if self._at.get(operation) == (deadline, serial):
                return deadline
            heappop(self._order)
        return None

    def pass_until(self, now: float, passed: Callable[[int], None]) -> None:
        """Call `passed` for the operations whose deadline is not after `now`, and drop it."""
        while (deadline := self.next()) is not None and deadline <= now:
            _, _, operation = heappop(self._order)
            del self._at[operation]
            passed(operation)
