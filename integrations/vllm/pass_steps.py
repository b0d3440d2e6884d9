"""Extra cache steps within a pass of vLLM's scheduler, so that a short wait can replace a whole pass.

The number of extra steps is equal on every rank, because it follows from replicated state and the
schedule.
"""

from ...ranks.group.host_cache import HostCache

LOOKUP_STEPS = 4
"""Maximum number of extra steps in which a pass of an idle engine waits for storage lookups."""

BUSY_WAIT_S = 0.001
"""Maximum seconds of the one wait for storage lookups in a pass in which other requests compute.

The wait delays all requests. In return, the request with the lookup need not wait for a whole forward
pass.
"""

LAST_STEPS, LAST_WAIT_S = 2, 0.0005
"""Maximum number of extra steps, and seconds of wait in each, in which ranks agree on copies that have
just finished."""


class PassSteps:
    """Runs extra cache steps within passes, unless ranks can send ballots only in vLLM's own steps."""

    def __init__(self, cache: HostCache, idle_wait_s: float, *, allowed: bool) -> None:
        self._cache = cache
        self._idle_wait_s = idle_wait_s
        self._allowed = allowed
        self._wait_s = 0.0
        self._left = 0

    def begin(self, *, idle: bool, behind: bool) -> None:
        """Begin a scheduler pass; `idle` is True if no other request computes.

        If `behind` is True, the ranks have not yet agreed on finished copies, and an extra step lets
        them agree.
        """
        self._left = (LOOKUP_STEPS if idle else 1) if self._allowed else 0
        self._wait_s = self._idle_wait_s if idle else min(self._idle_wait_s, BUSY_WAIT_S)
        if behind and self._allowed:
            self._step(LAST_WAIT_S)

    def prefetched(self, name: str) -> bool:
        """Return whether a request's prefetch is done.

        While the prefetch looks up pages in the store, this method runs extra steps, as many as the
        pass may still run.
        """
        while not self._cache.prefetch_done(name):
            if not self._left or not self._cache.looks_up(name):
                return False
            self._left -= 1
            self._step(self._wait_s)
        return True

    def _step(self, wait_s: float) -> None:
        """End the current cache step and begin another one."""
        self._cache.end_step(idle_s=wait_s)
        self._cache.begin_step()
