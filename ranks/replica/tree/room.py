"""Room: pages for whatever needs them, and the eviction of others for it.

What nobody holds leaves in the order of the eviction policy, so far as it is needed; what a namespace
keeps beyond its limits leaves by itself. Under write-back what leaves the device is saved first.
"""

from collections.abc import Callable, Iterable, Sequence

from ....errors import InternalError
from ...protocol.notices import Cause
from ..core.journal import Journal
from ..core.pages import PagePool, PageRun
from .node import DEVICE, Node
from .residence import TIERS, Leaving, Residence


class Room:
    """Takes pages, and evicts where there are too few."""

    def __init__(
        self, residence: Residence, journal: Journal, split: Callable[[Node, int], None]
    ) -> None:
        """`split` cuts a node."""
        self._residence = residence
        self._components = residence.components
        self._journal = journal
        self._split = split
        self.saves: Callable[[Node, int], bool] | None = None
        """Under write-back: begins to back up a node whose pages of a component are to leave the
        device, and says whether they have to stay for it."""

    def has_free(self, tier: int, counts: Sequence[int]) -> bool:
        """Say whether `take` would not have to evict anything."""
        return all(map(PagePool.has, self._residence.pools[tier], counts))

    def take(self, tier: int, counts: Sequence[int]) -> list[PageRun] | None:
        """Take pages of each component, evicting what is the first to leave.

        None if there are not so many to be had, or if what is to leave the device has to be backed
        up first; then nothing was evicted.
        """
        pools = self._residence.pools[tier]
        if self.has_free(tier, counts):
            return list(map(PagePool.take, pools, counts))
        if not self._can_find(tier, counts):
            return None
        # What is being backed up is locked for it, also where only a part of a node is.
        saves = self.saves if tier == DEVICE else None
        if saves and (self._have_to_wait(counts, saves) or not self._can_find(tier, counts)):
            return None
        for index, count in enumerate(counts):
            if pools[index].free < count:
                self._make_room(tier, index, count - pools[index].free)
        return list(map(PagePool.take, pools, counts))

    def take_one(self, tier: int, component: int, count: int) -> PageRun | None:
        """Take pages of one component; as `take`."""
        counts = [0] * len(self._components)
        counts[component] = count
        taken = self.take(tier, counts)
        return None if taken is None else taken[component]

    def evict_all(self, tier: int, nodes: Iterable[Node], cause: Cause) -> None:
        """Evict what nothing holds on a tier of these nodes; each comes before its parent."""
        leaving = self._residence.leaving(cause)
        for node in nodes:
            if self._residence.evictable(tier, 0, node):
                self._evict(node, tier, 0, leaving)
        self._residence.give_back(leaving, tier)

    def enforce_limits(self, now_ms: int) -> None:
        """Evict what namespaces keep beyond their quotas or times, as far as nothing holds it."""
        if not self._residence.limits.are_set:
            return
        for tier in TIERS:
            leaving = self._residence.leaving(Cause.LIMIT)
            while (over := self._residence.limits.over_quota(tier)) is not None:
                victim, surplus = over
                if surplus < victim.width:
                    # As much of the run as the quota allows stays.
                    self._split(victim, victim.width - surplus)
                if tier == DEVICE and self.saves is not None:
                    self._residence.limits.leave(victim, tier)
                    self._residence.changed[victim] = None
                    if self.saves(victim, 0):
                        continue
                self._evict(victim, tier, 0, leaving)
            for victim in self._residence.limits.expired(tier, now_ms):
                self._evict(victim, tier, 0, leaving)
            if leaving.victims:
                self._residence.give_back(leaving, tier)

    def _can_find(self, tier: int, counts: Sequence[int]) -> bool:
        return all(
            count <= self._residence.available(tier, index) for index, count in enumerate(counts)
        )

    def _have_to_wait(self, counts: Sequence[int], saves: Callable[[Node, int], bool]) -> bool:
        """Say whether something that is to leave the device is being backed up instead."""
        waits = False
        for component, count in zip(self._components, counts, strict=True):
            queue = self._residence.queues[DEVICE][component.index]
            short = count - self._residence.pools[DEVICE][component.index].free
            first: list[Node] = []
            while short > 0:
                victim = queue.next_victim()
                if victim is None:
                    break
                first.append(victim)
                short -= component.pages_of(victim.width)
                waits |= saves(victim, component.index)
            for node in first:
                queue.try_enter(node)
        return waits

    def _make_room(self, tier: int, component: int, short: int) -> None:
        queue, pool = (
            self._residence.queues[tier][component],
            self._residence.pools[tier][component],
        )
        leaving = self._residence.leaving(Cause.ROOM)
        mine = leaving.runs[tier][component]
        while len(mine) < short:
            victim = queue.next_victim()
            if victim is None:
                raise InternalError(f"{pool.name} pages that could be evicted are miscounted")
            surplus = len(mine) + victim.width - short
            if surplus > 0 and not component:
                self._split(victim, surplus)
            self._evict(victim, tier, component, leaving)
        self._residence.give_back(leaving, tier, component)

    def _evict(self, victim: Node, tier: int, component: int, leaving: Leaving) -> None:
        leaving.victims.append(victim.id)
        if not component:
            self._residence.detach_all(victim, tier, leaving)
            self._residence.remove_if_dead(victim)
            return
        self._residence.detach(victim, tier, component, leaving)
        if not victim.children:
            self._residence.cascade(victim, leaving)
