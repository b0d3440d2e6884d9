"""Extra cache steps within a scheduler pass: a short wait instead of another pass.

Their number is equal on every rank, because it follows from replicated state and the schedule.
"""

from ...ranks.group.host_cache import HostCache

LOOKUP_STEPS = 4
"""Steps that a pass of an idle engine waits for lookup results."""

BUSY_WAIT_S = 0.001
"""Maximum wait for lookup results, once per pass, while other requests compute.

The wait delays all requests, but saves the looked-up request a whole forward pass.
"""

LAST_STEPS, LAST_WAIT_S = 2, 0.0005
"""Number of steps, and seconds per step, that wait for finished copies after the last token."""


class PassSteps:
    """Runs extra steps within passes, unless ranks answer only in the engine's own steps."""

    def __init__(self, cache: HostCache, idle_wait_s: float, *, allowed: bool) -> None:
        self._cache = cache
        self._idle_wait_s = idle_wait_s
        self._allowed = allowed
        self._wait_s = 0.0
        self._left = 0

    def begin(self, *, idle: bool, behind: bool) -> None:
        """Begin a pass; `idle` means that no other request computes.

        With `behind`, the ranks have not yet agreed on copies that finished after the last token.
        """
        self._left = (LOOKUP_STEPS if idle else 1) if self._allowed else 0
        self._wait_s = self._idle_wait_s if idle else min(self._idle_wait_s, BUSY_WAIT_S)
        if behind and self._allowed:
            self._step(LAST_WAIT_S)

    def prefetched(self, name: str) -> bool:
        """Return whether a request's prefetch is done, after extra steps if needed and allowed."""
        while not self._cache.prefetch_done(name):
            if not self._left or not self._cache.looks_up(name):
                return False
            self._left -= 1
            self._step(self._wait_s)
        return True

    def _step(self, wait_s: float) -> None:
        """End the current step and begin another."""
        self._cache.end_step(idle_s=wait_s)
        self._cache.begin_step()
