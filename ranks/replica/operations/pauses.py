"""Backoff between retries."""

from ..core.replica_parts import Clock

FIRST_MS = 1_000
LONGEST_MS = 30_000


class Pauses:
    """Exponential backoff: after a failure, one try is allowed after each pause, until a try succeeds.

    Pauses double up to `LONGEST_MS`. They are measured in agreed time, so that they are equal on every
    rank.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._length_ms = 0
        """The current pause in ms; 0 if there was no failure since the last success."""
        self._until_ms = 0

    @property
    def are_on(self) -> bool:
        """Whether the backoff is on: there was a failure, and no success since."""
        return self._length_ms > 0

    @property
    def blocks(self) -> bool:
        """Whether a backoff pause is running, so that no try may begin now."""
        return self._length_ms > 0 and self._clock.agreed_ms < self._until_ms

    def allow(self) -> bool:
        """Return whether a try may begin now.

        If it may, and the last try failed, the next pause starts.
        """
        if self.blocks:
            return False
        if self._length_ms:
            self._pause(2 * self._length_ms)
        return True

    def failed(self) -> None:
        """Start the first pause. Failures during a backoff do not lengthen the pause."""
        if not self._length_ms:
            self._pause(FIRST_MS)

    def succeeded(self) -> None:
        """End the backoff after a success."""
        self._length_ms = 0

    def _pause(self, length_ms: int) -> None:
        self._length_ms = min(length_ms, LONGEST_MS)
        self._until_ms = self._clock.agreed_ms + self._length_ms
