"""How much one call to a store should move, so that calls are few and progress is seen all the same.

Each call costs the interpreter's time, which the engine's thread needs too, so a fast store wants large
calls. What a call has moved is known only when it ends, so a slow one wants small calls: what is still
in flight when a prefetch is stopped was read in vain.
"""

from typing import Final

CALL_BYTES_MIN: Final = 4 << 20
CALL_BYTES_MAX: Final = 32 << 20
_CALL_S: Final = 0.02
"""How long a call should last where no other goes on beside it."""
_WINDOW_S: Final = 0.05
"""A store that never rests is looked at this often."""
_LEAST_S: Final = 0.0005
"""Shorter intervals are not measured."""


class Pace:
    """Throughput of a store in one direction, measured at calls that return. One thread uses it.

    Times are in seconds, on one clock that does not go back.
    """

    def __init__(self) -> None:
        self.call_bytes = CALL_BYTES_MIN
        """The bytes that one call should move, unless a single page has more."""
        self._calls = 0
        self._since = 0.0
        self._least_s = 0.0
        self._nbytes = 0

    def begin(self, now: float) -> None:
        """Note that a call begins."""
        if not self._calls:
            self._since, self._nbytes, self._least_s = now, 0, _LEAST_S
        self._calls += 1

    def end(self, nbytes: int, now: float) -> None:
        """Note that a call ends, which has moved so many bytes; none for what was not there."""
        self._calls -= 1
        self._nbytes += nbytes
        lasted_s = now - self._since
        if lasted_s < (_WINDOW_S if self._calls else self._least_s):
            return
        # A store that has little to move says nothing of how fast it is.
        if lasted_s < _WINDOW_S and self._nbytes < CALL_BYTES_MIN:
            return
        wanted = self._nbytes / lasted_s * _CALL_S
        likely = (self.call_bytes + wanted) / 2
        self.call_bytes = int(min(max(likely, CALL_BYTES_MIN), CALL_BYTES_MAX))
        # Calls that go on have moved bytes already, which a short time would make too much of.
        self._since, self._nbytes, self._least_s = now, 0, _WINDOW_S
