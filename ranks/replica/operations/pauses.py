"""Pauses between tries of something that has failed."""

from ..core.basis import Clock

FIRST_MS = 1_000
LONGEST_MS = 30_000


class Pauses:
    """After a failure one try is allowed at the end of each pause, until one succeeds.

    Each pause is twice as long as the one before. They are counted in agreed time, so they are the same
    on every rank.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._length_ms = 0
        """0 while nothing has failed since the last success."""
        self._until_ms = 0

    @property
    def are_on(self) -> bool:
        """Whether nothing has succeeded since the last failure."""
        return self._length_ms > 0

    @property
    def blocks(self) -> bool:
        """Whether no try may begin now."""
        return self._length_ms > 0 and self._clock.agreed_ms < self._until_ms

    def allow(self) -> bool:
        """Say whether a try may begin now; if it is the one after a pause, the next pause begins."""
        if self.blocks:
            return False
        if self._length_ms:
            self._pause(2 * self._length_ms)
        return True

    def failed(self) -> None:
        """Take note of a failure; what was begun before the first one makes no pause longer."""
        if not self._length_ms:
            self._pause(FIRST_MS)

    def succeeded(self) -> None:
        """Take note of a success."""
        self._length_ms = 0

    def _pause(self, length_ms: int) -> None:
        self._length_ms = min(length_ms, LONGEST_MS)
        self._until_ms = self._clock.agreed_ms + self._length_ms
