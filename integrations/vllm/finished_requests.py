"""Finished requests whose blocks the engine cannot reuse yet."""

from ...ranks.group.host_cache import HostCache
from .pass_steps import LAST_STEPS, LAST_WAIT_S
from .pending_backups import PendingBackups
from .producer import PrefillProducer
from .tracked import FinishedRequest, TrackedRequest

GIVEN_WAIT_S = 1.0
"""How long an engine without requests steps until promised pages are served, in agreed seconds."""


class FinishedRequests:
    """Issues the commands for finished requests, and reports whose blocks are free."""

    def __init__(self, cache: HostCache, giving: PrefillProducer, backups: PendingBackups) -> None:
        """`giving` serves requests to other engines; `backups` waits for room in host memory."""
        self._cache = cache
        self._giving = giving
        self._backups = backups
        self._ended: list[FinishedRequest] = []
        """Requests that finished since the last pass."""
        self._leaving: dict[str, FinishedRequest] = {}
        """Requests whose blocks are still being copied, by name."""
        self._over: list[TrackedRequest] = []
        """Requests whose load has finished, not yet reported to the engine."""
        self._given_back: list[str] = []
        """Names of requests whose blocks were returned to the engine with copies still in flight."""

    @property
    def lent(self) -> list[str]:
        """Names of requests whose blocks are only waiting for copies that read them."""
        return [name for name, each in self._leaving.items() if not each.loading]

    @property
    def frees(self) -> bool:
        """Whether waiting frees blocks of requests that another engine continues."""
        return any(
            each.tracked.given and self._cache.awaits_copies(name)
            for name, each in self._leaving.items()
        )

    def ended(self, request: FinishedRequest) -> None:
        """Record a finished request."""
        self._ended.append(request)

    def commit(self) -> None:
        """Issue the commands for requests finished since the last pass, in order of arrival.

        The engine reports requests aborted together in a different order on each rank.
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
        """Wait for copies of blocks that were already returned; return whether there were any."""
        given_back, self._given_back = self._given_back, []
        for name in given_back:
            self._cache.wait_for_copies(name)
        return bool(given_back)

    def freed(self) -> tuple[list[TrackedRequest], list[TrackedRequest]]:
        """Return the requests whose awaited load has finished, and those whose blocks are free."""
        loaded, self._over = self._over, []
        freed: list[TrackedRequest] = []
        self._cache.collect_freed()
        # `collect_freed` names only released requests; these may be unreleased or without any copy.
        for name in [name for name in self._leaving if not self._cache.has_copies_in_flight(name)]:
            ended = self._leaving.pop(name)
            # For a finished request, the end of its load only means that its blocks are free.
            (loaded if ended.loading else freed).append(ended.tracked)
        return loaded, freed

    def last_steps(self) -> bool:
        """Run steps for an engine that takes none; return whether the engine gets any result.

        Most copies have finished by now, and a step lets all ranks agree on that. Promised pages are
        awaited, because no later step serves them.
        """
        cache = self._cache
        cache.step_until(self._giving.serve, GIVEN_WAIT_S)
        if not (self._leaving or self._over):
            return False
        if len(self.lent) < len(self._leaving):
            # A load writes into the blocks, so it must finish.
            cache.finish_copies()
        for _ in range(LAST_STEPS):
            if any(map(cache.has_copies_in_flight, self._leaving)):
                cache.step(idle_s=LAST_WAIT_S)
        return True

    def give_back(self, *, still_read: bool) -> list[TrackedRequest]:
        """Return all requests whose blocks are only read; the engine gets their blocks back now.

        If the blocks are `still_read`, `wait_for_copies` must run before they are overwritten.
        """
        names = self.lent
        if still_read:
            self._given_back += names
        return [self._leaving.pop(name).tracked for name in names]
