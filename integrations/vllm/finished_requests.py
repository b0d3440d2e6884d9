"""Finished requests whose blocks the engine cannot reuse yet."""

from ...ranks.group.host_cache import HostCache
from .pass_steps import LAST_STEPS, LAST_WAIT_S
from .pending_backups import PendingBackups
from .producer import PrefillProducer
from .tracked import FinishedRequest, TrackedRequest

GIVEN_WAIT_S = 1.0
"""Seconds of agreed time that an engine without requests steps until promised pages are served."""


class FinishedRequests:
    """Issues the commands for finished requests, and reports requests whose blocks are free."""

    def __init__(self, cache: HostCache, giving: PrefillProducer, backups: PendingBackups) -> None:
        """`giving` serves finished requests to other engines; `backups` has unfinished backups."""
        self._cache = cache
        self._giving = giving
        self._backups = backups
        self._ended: list[FinishedRequest] = []
        """Requests that finished since the last pass."""
        self._leaving: dict[str, FinishedRequest] = {}
        """Requests whose blocks are still being copied, by name."""
        self._over: list[TrackedRequest] = []
        """Requests whose load has finished, but which were not yet reported to the engine."""
        self._given_back: list[str] = []
        """Names of requests whose blocks the engine got back while copies still read the blocks."""

    @property
    def lent(self) -> list[str]:
        """Names of requests whose blocks are only read: copies from the blocks are still in flight."""
        return [name for name, each in self._leaving.items() if not each.loading]

    @property
    def frees(self) -> bool:
        """Whether blocks of requests handed to another engine become free when copies finish."""
        return any(
            each.tracked.given and self._cache.awaits_copies(name)
            for name, each in self._leaving.items()
        )

    def ended(self, request: FinishedRequest) -> None:
        """Record a finished request; the next `commit` issues its commands."""
        self._ended.append(request)

    def commit(self) -> None:
        """Issue the commands for requests that finished since the last pass, in order of arrival.

        The requests are sorted, because the engine reports requests that were aborted together in a
        different order on each rank.
        """
        ended, self._ended = self._ended, []
        for each in sorted(ended, key=lambda each: each.tracked.number):
            name = each.tracked.name
            if each.fenced:
                self._backups.drop(name)
                self._cache.fence(name)
            if each.tracked.given and not each.fenced:
                self._giving.begin(each.tracked)
                free = not self._cache.has_copies_in_flight(name)
            elif name in self._backups:
                self._backups.ended(name)
                free = not self._cache.has_copies_in_flight(name)
            else:
                free = self._cache.release(name)
            if not free:
                self._leaving[name] = each
            elif each.loading:
                self._over.append(each.tracked)

    def wait_for_copies(self) -> bool:
        """Wait for copies of blocks that the engine already got back; return whether there were any."""
        given_back, self._given_back = self._given_back, []
        for name in given_back:
            self._cache.wait_for_copies(name)
        return bool(given_back)

    def freed(self) -> tuple[list[TrackedRequest], list[TrackedRequest]]:
        """Return the requests whose awaited load has finished, and those whose blocks are free."""
        loaded, self._over = self._over, []
        freed: list[TrackedRequest] = []
        self._cache.collect_freed()
        # Check every request, because `collect_freed` returns only released requests.
        for name in [name for name in self._leaving if not self._cache.has_copies_in_flight(name)]:
            ended = self._leaving.pop(name)
            # Reporting the load of a finished request as finished makes the engine free its blocks.
            (loaded if ended.loading else freed).append(ended.tracked)
        return loaded, freed

    def last_steps(self) -> bool:
        """Run cache steps for an engine that no longer steps; return whether it must read results.

        Most copies have finished by now, and all ranks agree on that in a step. Wait for promised
        pages, too, because no later step would serve them.
        """
        cache = self._cache
        cache.step_until(self._giving.serve, GIVEN_WAIT_S)
        if not (self._leaving or self._over):
            return False
        if len(self.lent) < len(self._leaving):
            # Wait for loads, because the engine cannot reuse blocks into which a load writes.
            cache.finish_copies()
        for _ in range(LAST_STEPS):
            if any(map(cache.has_copies_in_flight, self._leaving)):
                cache.step(idle_s=LAST_WAIT_S)
        return True

    def give_back(self, *, still_read: bool) -> list[TrackedRequest]:
        """Return all requests whose blocks are only read, so that the engine gets the blocks back now.

        With `still_read`, copies may still read the blocks, so `wait_for_copies` must run before the
        engine overwrites them.
        """
        names = self.lent
        if still_read:
            self._given_back += names
        return [self._leaving.pop(name).tracked for name in names]
