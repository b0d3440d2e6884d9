"""Requests that have ended, until the engine has their blocks back."""

from ...ranks.group.host_cache import HostCache
from .giving import Giving
from .pass_steps import LAST_STEPS, LAST_WAIT_S
from .pending_backups import PendingBackups
from .tracked import Ended, TrackedRequest

GIVEN_WAIT_S = 1.0
"""How long the last token waits for what another engine was promised to be there, in agreed time."""


class Leaving:
    """Gives the commands for requests that end, and says whose blocks are free by now."""

    def __init__(self, cache: HostCache, giving: Giving, backups: PendingBackups) -> None:
        """`giving` keeps those that other engines go on with, `backups` those not yet on the host."""
        self._cache = cache
        self._giving = giving
        self._backups = backups
        self._ended: list[Ended] = []
        """Those that have ended since the last pass."""
        self._leaving: dict[str, Ended] = {}
        """Those whose blocks are still copied, by name."""
        self._over: list[TrackedRequest] = []
        """Those whose load is over, and of which the engine has not heard yet."""
        self._given_back: list[str] = []
        """Those, by name, that still lend blocks which the engine was given back all the same."""

    @property
    def lent(self) -> list[str]:
        """The requests for whose blocks nothing is waited for but copies that read them."""
        return [name for name, each in self._leaving.items() if not each.loading]

    @property
    def frees(self) -> bool:
        """Whether waiting frees blocks of requests that another engine goes on with."""
        return any(
            each.tracked.given and self._cache.awaits_copies(name)
            for name, each in self._leaving.items()
        )

    def ended(self, request: Ended) -> None:
        """Note that a request has ended."""
        self._ended.append(request)

    def commit(self) -> None:
        """Give the commands for what has ended since the last pass, in the order of arrival.

        The engine tells of requests that are aborted together in another order on each rank.
        """
        ended, self._ended = self._ended, []
        for each in sorted(ended, key=lambda each: each.tracked.number):
            name = each.tracked.name
            if each.fenced:
                self._backups.drop(name)
                self._cache.fence(name)
            if each.tracked.given and not each.fenced:
                self._giving.begin(each.tracked)
                free = not self._cache.lends(name)
            elif name in self._backups:
                self._backups.ended(name)
                free = not self._cache.lends(name)
            else:
                free = self._cache.release(name)
            if not free:
                self._leaving[name] = each
            elif each.loading:
                self._over.append(each.tracked)

    def keep_off(self) -> bool:
        """Return when no copy touches blocks that were given back; say whether there were any."""
        given_back, self._given_back = self._given_back, []
        for name in given_back:
            self._cache.keep_off(name)
        return bool(given_back)

    def freed(self) -> tuple[list[TrackedRequest], list[TrackedRequest]]:
        """Return those of which a load was waited for and is over, and those whose blocks are free."""
        loaded, self._over = self._over, []
        freed: list[TrackedRequest] = []
        self._cache.collect_freed()
        # Also of those that are not released, and of a backup that was given up before any was told of.
        for name in [name for name in self._leaving if not self._cache.lends(name)]:
            ended = self._leaving.pop(name)
            # That the load is over says no more than that the blocks are free.
            (loaded if ended.loading else freed).append(ended.tracked)
        return loaded, freed

    def last_steps(self) -> bool:
        """Take steps for an engine that takes none; say whether it is to hear of anything.

        Copies have mostly ended by now, and a step lets all ranks know it. What another engine was
        promised is waited for: nothing would serve it later.
        """
        cache = self._cache
        cache.step_until(self._giving.serve, GIVEN_WAIT_S)
        if not (self._leaving or self._over):
            return False
        if len(self.lent) < len(self._leaving):
            # A load writes into the blocks.
            cache.finish_copies()
        for _ in range(LAST_STEPS):
            if any(map(cache.lends, self._leaving)):
                cache.step(idle_s=LAST_WAIT_S)
        return True

    def give_back(self, *, still_read: bool) -> list[TrackedRequest]:
        """Return all requests whose blocks are only read, and which the engine is to have back now.

        Where they are `still_read`, `keep_off` comes before anything overwrites them.
        """
        names = self.lent
        if still_read:
            self._given_back += names
        return [self._leaving.pop(name).tracked for name in names]
