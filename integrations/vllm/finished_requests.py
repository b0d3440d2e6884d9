"""Finished requests of vLLM whose blocks vLLM cannot reuse yet."""

from ...ranks.group.host_cache import HostCache
from .pass_steps import LAST_STEPS, LAST_WAIT_S
from .pending_backups import PendingBackups
from .producer import PrefillProducer
from .tracked import FinishedRequest, TrackedRequest

GIVEN_WAIT_S = 1.0
"""Maximum seconds of agreed time that an engine without requests keeps stepping to serve promised
pages."""


class FinishedRequests:
    """Issues the commands for finished requests, and reports the requests whose blocks are free."""

    def __init__(self, cache: HostCache, giving: PrefillProducer, backups: PendingBackups) -> None:
        """`giving` serves finished requests to other engines; `backups` has the unfinished backups."""
        self._cache = cache
        self._giving = giving
        self._backups = backups
        self._ended: list[FinishedRequest] = []
        """Requests that finished since the last scheduler pass."""
        self._leaving: dict[str, FinishedRequest] = {}
        """Maps the name of a finished request to the request, as long as copies access its blocks."""
        self._over: list[TrackedRequest] = []
        """Finished requests whose load has ended, but which were not reported to the engine yet."""
        self._given_back: list[str] = []
        """Names of requests whose blocks were returned to the engine although copies may still read
        them."""

    @property
    def lent(self) -> list[str]:
        """Names of finished requests without a load in flight; copies can only read their blocks."""
        return [name for name, each in self._leaving.items() if not each.loading]

    @property
    def frees(self) -> bool:
        """Whether copies in flight keep blocks of a request with promised pages allocated."""
        return any(
            each.tracked.given and self._cache.awaits_copies(name)
            for name, each in self._leaving.items()
        )

    def ended(self, request: FinishedRequest) -> None:
        """Record a finished request; the next `commit` issues its commands."""
        self._ended.append(request)

    def commit(self) -> None:
        """Issue the commands for requests that finished since the last pass, in order of arrival.

        The requests are sorted, because the order in which an engine reports requests that were aborted
        together differs between ranks.
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
        """Wait for copies that read blocks already returned to the engine.

        Return whether there were any such copies.
        """
        given_back, self._given_back = self._given_back, []
        for name in given_back:
            self._cache.wait_for_copies(name)
        return bool(given_back)

    def freed(self) -> tuple[list[TrackedRequest], list[TrackedRequest]]:
        """Return (loaded, freed): requests whose load has ended; requests whose blocks became free."""
        loaded, self._over = self._over, []
        freed: list[TrackedRequest] = []
        self._cache.collect_freed()
        # Check each finished request for copies in flight, because `collect_freed` returns only
        # requests that were released.
        for name in [name for name in self._leaving if not self._cache.has_copies_in_flight(name)]:
            ended = self._leaving.pop(name)
            # If the request finished during a load, report the load's end, because the engine then
            # frees the request's blocks.
            (loaded if ended.loading else freed).append(ended.tracked)
        return loaded, freed

    def last_steps(self) -> bool:
        """Run the last cache steps of an engine that stops stepping.

        Return whether results of finished requests remain for the engine to read. Most copies have
        finished by now, and in these steps all ranks agree on that. Promised pages are served here,
        too, because no later step would serve them.
        """
        cache = self._cache
        cache.step_until(self._giving.serve, GIVEN_WAIT_S)
        if not (self._leaving or self._over):
            return False
        if len(self.lent) < len(self._leaving):
            # Wait for loads, because the engine cannot reuse blocks that a load writes.
            cache.finish_copies()
        for _ in range(LAST_STEPS):
            if any(map(cache.has_copies_in_flight, self._leaving)):
                cache.step(idle_s=LAST_WAIT_S)
        return True

    def give_back(self, *, still_read: bool) -> list[TrackedRequest]:
        """Return all finished requests whose blocks are only read, so that the engine frees the blocks.

        If `still_read` is True, copies in flight may read the blocks even after this call.
        `wait_for_copies` must then run before the engine overwrites them.
        """
        names = self.lent
        if still_read:
            self._given_back += names
        return [self._leaving.pop(name).tracked for name in names]
