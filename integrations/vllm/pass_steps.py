"""Steps that a pass of the scheduler takes of its own: a moment's wait in the place of another pass.

How many there are follows from replicated state and from what was scheduled, the same on every rank.
"""

from ...ranks.group.host_cache import HostCache

LOOKUP_STEPS = 4
"""Steps in which a pass of an engine that has nothing to compute waits for answers to lookups."""

BUSY_WAIT_S = 0.001
"""For how long, once, a pass does so while other requests compute. All of them wait for it, which is
worth it to a request that would be put off by a whole forward pass; a slow store is not waited for."""

LAST_STEPS, LAST_WAIT_S = 2, 0.0005
"""In how many steps, and for how long in each, the last token waits for copies that have ended."""


class PassSteps:
    """Takes steps in passes, unless only the engine's own steps bring what other ranks say."""

    def __init__(self, cache: HostCache, idle_wait_s: float, *, allowed: bool) -> None:
        self._cache = cache
        self._idle_wait_s = idle_wait_s
        self._allowed = allowed
        self._wait_s = 0.0
        self._left = 0

    def begin(self, *, idle: bool, behind: bool) -> None:
        """Begin a pass, in which nothing else computes if it is `idle`.

        With `behind` the ranks have not told each other yet of copies that ended after the last token.
        """
        self._left = (LOOKUP_STEPS if idle else 1) if self._allowed else 0
        self._wait_s = self._idle_wait_s if idle else min(self._idle_wait_s, BUSY_WAIT_S)
        if behind and self._allowed:
            self._step(LAST_WAIT_S)

    def prefetched(self, name: str) -> bool:
        """Say whether a request need not wait for its prefetch, if need be after some steps."""
        while not self._cache.prefetch_done(name):
            if not self._left or not self._cache.looks_up(name):
                return False
            self._left -= 1
            self._step(self._wait_s)
        return True

    def _step(self, wait_s: float) -> None:
        """End the step that the pass is in, and begin another."""
        self._cache.end_step(idle_s=wait_s)
        self._cache.begin_step()
