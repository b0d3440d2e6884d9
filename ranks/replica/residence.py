"""Where pages are: pools, what nodes own of them, and how room is made.

The pages of a pool are free, or belong to a node of the tree, a request or an operation. What a node
owns may be evicted unless something holds it: the pages of full attention from the leaves up, with
everything that other components have on that tier beside them; those of other components wherever
they are, which leaves a tombstone. What a tombstone has made useless leaves with it (the cascade),
as far up as nothing holds it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from ...errors import InternalError
from .eviction import EvictionQueue
from .eviction_policies import find_policy
from .holds import Holds, Receipt
from .journal import Journal
from .limits import Limits
from .pages import PagePool, PageRun, page_run
from .settings import ReplicaConfig
from .tree import DEVICE, HOST, Node, Tree

TIERS = (DEVICE, HOST)
TIER_NAMES = ("device", "host")

Freed = tuple[list[PageRun], list[PageRun]]
"""By tier and component: pages that are on their way back to the free list."""


class Residence:
    """The pools of both tiers, what nodes own, and the order in which it leaves."""

    def __init__(
        self,
        config: ReplicaConfig,
        tree: Tree,
        journal: Journal,
        *,
        split: Callable[[Node, int], None],
        emptied: Callable[[Node], None],
    ) -> None:
        """`split` cuts a node; `emptied` is told of a root that has no children any more."""
        self._tree = tree
        self._components = tree.components
        self._others = range(1, len(tree.components))
        self._journal = journal
        self._split = split
        self._emptied = emptied
        self.pools = tuple(
            tuple(
                PagePool(_pool_name(tier, component.pool, component.index), pages, journal)
                for component, pages in zip(self._components, config.pool_pages(tier), strict=True)
            )
            for tier in TIERS
        )
        """By tier and component."""
        self.tree_pages = tuple([0] * len(self._components) for _ in TIERS)
        """By tier and component: pages that nodes of the tree own."""
        self.holds = Holds(len(self._components), self._offer)
        policy = find_policy(config.eviction)
        self.queues = tuple(
            tuple(
                EvictionQueue(policy, partial(self.evictable, tier, each.index))
                for each in self._components
            )
            for tier in TIERS
        )
        """By tier and component: what may be evicted, in the order in which it is."""
        self.saves: Callable[[Node, int], bool] | None = None
        """Under write-back: begins to back up a node whose pages of a component are to leave the
        device, and says whether they have to stay for it."""
        self.came_to_host: Callable[[Node], None] | None = None
        """Is told of each node that got pages of a component there."""
        count = len(self._components)
        on_tier = (1 << count) - 1
        self._off_tier = (~on_tier, ~(on_tier << count))
        """By tier: the bits of `Node.there` of everything but that tier."""
        self.limits = Limits(config.limits, lambda tier, node: self.evictable(tier, 0, node))

    def evictable(self, tier: int, component: int, node: Node) -> bool:
        """Say whether a node's pages of a component may leave a tier.

        Nothing may hold them there, and those of full attention must be a leaf's of its tier.
        """
        if node.values[tier][component] is None or node.held[tier][component]:
            return False
        return bool(component) or not node.occupied_children[tier]

    def available(self, tier: int, component: int) -> int:
        """Return how many pages `take` can find: free ones, and those that may be evicted."""
        kept = self.holds.kept_pages[tier][component]
        return self.pools[tier][component].free + self.tree_pages[tier][component] - kept

    def has_free(self, tier: int, counts: Sequence[int]) -> bool:
        """Say whether `take` would not have to evict anything."""
        return all(map(PagePool.has, self.pools[tier], counts))

    def take(self, tier: int, counts: Sequence[int]) -> list[PageRun] | None:
        """Take pages of each component, evicting what is the first to leave.

        None if there are not so many to be had, or if what is to leave the device has to be backed
        up first; then nothing was evicted.
        """
        pools = self.pools[tier]
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

    def attach(self, node: Node, tier: int, component: int, pages: PageRun) -> None:
        """Give a node its pages of a component on a tier; they belong to it from now on."""
        values = node.values[tier]
        fits = len(pages) == self._components[component].pages_of(node.width)
        has_base = not component or values[0] is not None
        if values[component] is not None or not fits or not has_base or node.parent is None:
            raise InternalError(f"node {node.id} cannot take {len(pages)} pages on tier {tier}")
        values[component] = pages
        node.there |= 1 << (tier * len(values) + component)
        self.tree_pages[tier][component] += len(pages)
        if tier == HOST and self.came_to_host is not None:
            self.came_to_host(node)
        if not component:
            node.parent.occupied_children[tier] += 1
            # It is a leaf of its tier no more, and nobody tells the queue of its uses.
            self.queues[tier][0].discard(node.parent)
            if self.limits.are_set:
                self.limits.count(node, tier, len(pages))
        if node.held[tier][component]:
            self.holds.value_changed(node, tier, component, len(pages))
        elif component or not node.occupied_children[tier]:
            self.queues[tier][component].enter(node)
            if not component and self.limits.are_set:
                self.limits.offer(node, tier)

    def detach(self, node: Node, tier: int, component: int) -> PageRun:
        """Take a node's pages away from it; they belong to the caller from now on.

        Those of full attention are the last to be taken from a tier.
        """
        values = node.values[tier]
        pages = values[component]
        assert pages is not None
        values[component] = None
        node.there &= ~(1 << (tier * len(values) + component))
        self.holds.value_changed(node, tier, component, -len(pages))
        self.tree_pages[tier][component] -= len(pages)
        self.queues[tier][component].discard(node)
        if not component:
            parent = node.parent
            assert parent is not None
            parent.occupied_children[tier] -= 1
            self.limits.count(node, tier, -len(pages))
            if not parent.occupied_children[tier]:
                self._offer(parent, tier, 0)
        return pages

    def detach_all(self, node: Node, tier: int, freed: Freed) -> None:
        """Take away all that a node has on a tier, where nothing holds it, and note it in `freed`.

        As `detach` for each component, in one: nearly all evictions are this.
        """
        values, owned, queues = node.values[tier], self.tree_pages[tier], self.queues[tier]
        parent, base = node.parent, values[0]
        if base is None or parent is None:
            return
        into = freed[tier]
        for index, run in enumerate(values):
            if run is not None:
                values[index] = None
                owned[index] -= len(run)
                queues[index].discard(node)
                into[index].extend(run)
        node.there &= self._off_tier[tier]
        parent.occupied_children[tier] -= 1
        if self.limits.are_set:
            self.limits.count(node, tier, -len(base))
        if not parent.occupied_children[tier]:
            self._offer(parent, tier, 0)

    def nothing_freed(self) -> Freed:
        """Return empty runs, to collect freed pages in."""
        return ([page_run() for _ in self._components], [page_run() for _ in self._components])

    def give_back(self, freed: Freed) -> None:
        """Put pages that nobody owns any more on the free lists."""
        for pools, runs in zip(self.pools, freed, strict=True):
            for pool, pages in zip(pools, runs, strict=True):
                pool.give_back(pages)

    def evict_everything(self, tier: int) -> None:
        """Evict all that nothing holds on a tier."""
        freed = self.nothing_freed()
        victims: list[int] = []
        while (victim := self.queues[tier][0].next_victim()) is not None:
            victims.append(victim.id)
            self._evict(victim, tier, 0, freed)
        self._journal.record("evict", self.pools[tier][0].name, victims)
        self.give_back(freed)

    def enforce_limits(self, now_ms: int) -> None:
        """Evict what namespaces keep beyond their quotas or times, as far as nothing holds it."""
        if not self.limits.are_set:
            return
        for tier in TIERS:
            freed = self.nothing_freed()
            victims: list[int] = []
            while (over := self.limits.over_quota(tier)) is not None:
                victim, surplus = over
                if surplus < victim.width:
                    # As much of the run as the quota allows stays.
                    self._split(victim, victim.width - surplus)
                if tier == DEVICE and self.saves is not None:
                    self.limits.leave(victim, tier)
                    if self.saves(victim, 0):
                        continue
                victims.append(victim.id)
                self._evict(victim, tier, 0, freed)
            for victim in self.limits.expired(tier, now_ms):
                victims.append(victim.id)
                self._evict(victim, tier, 0, freed)
            if victims:
                self._journal.record("limit", self.pools[tier][0].name, victims)
                self.give_back(freed)

    def was_split(self, upper: Node) -> None:
        """Take note of the upper half of a node that was cut."""
        if self.limits.are_set:
            self.limits.was_split(upper)
        for tier in TIERS:
            for component, run in enumerate(upper.values[tier]):
                if run is not None:
                    self._offer(upper, tier, component)

    def touch(self, node: Node, clock: int, time_ms: int) -> None:
        """Mark the path to `node` as used at `clock`, from the root down."""
        if node.parent is None:
            return
        for each in node.path_down():
            each.last_access, each.used_ms = clock, time_ms
            for tier in TIERS:
                values, queues = each.values[tier], self.queues[tier]
                # Of full attention only the leaves of a tier are in its queue.
                if values[0] is not None and not each.occupied_children[tier]:
                    queues[0].used(each)
                for component in self._others:
                    if values[component] is not None:
                        queues[component].used(each)
            if self.limits.are_set:
                self.limits.used(each)

    def hold(self, tier: int, node: Node, *, requested: bool = False) -> list[Receipt]:
        """Lock or pin everything that a match ending at `node` needs.

        `requested` leaves out what a request does not use where it lies.
        """
        receipts: list[Receipt] = []
        if node.parent is None:
            # A match of nothing needs nothing, and a root is not to be kept for it.
            return receipts
        for component in self._components:
            if requested and not component.held_by_requests:
                continue
            start = component.needed_from(node.end) if component.per_page else node.start
            receipts.append(self.holds.acquire(tier, component.index, node, start))
        return receipts

    def remove_if_dead(self, node: Node) -> bool:
        """Take a node out of the tree that has pages on no tier and that nothing holds.

        Says whether it did. A tombstone that is held leaves by `prune` once it is let go.
        """
        parent = node.parent
        if node.there or node.children or parent is None or node.hold_count:
            return False
        self._tree.remove(node)
        if parent.parent is None and not parent.children:
            self._emptied(parent)
        return True

    def prune(self, node: Node) -> None:
        """Take out of the tree what of the path to `node` has no pages, no children and no holds."""
        while node.parent is not None and not node.hold_count:
            parent = node.parent
            if not self.remove_if_dead(node):
                return
            node = parent

    def cascade(self, node: Node, freed: Freed) -> None:
        """Remove `node`, and then its ancestors, as far as no match can end there any more.

        It stops at whatever is locked or pinned on either tier, is worked on by an operation, or has
        children: a parent under a prefetch or backup must not vanish (incident D).
        """
        while node.parent is not None and not (node.children or node.hold_count or node.marks):
            if self._tree.is_whole(node):
                return
            parent = node.parent
            for tier in TIERS:
                self.detach_all(node, tier, freed)
            self.remove_if_dead(node)
            node = parent

    def _can_find(self, tier: int, counts: Sequence[int]) -> bool:
        return all(count <= self.available(tier, index) for index, count in enumerate(counts))

    def _have_to_wait(self, counts: Sequence[int], saves: Callable[[Node, int], bool]) -> bool:
        """Say whether something that is to leave the device is being backed up instead."""
        waits = False
        for component, count in zip(self._components, counts, strict=True):
            queue = self.queues[DEVICE][component.index]
            short = count - self.pools[DEVICE][component.index].free
            first: list[Node] = []
            while short > 0:
                victim = queue.next_victim()
                if victim is None:
                    break
                first.append(victim)
                short -= component.pages_of(victim.width)
                waits |= saves(victim, component.index)
            for node in first:
                queue.offer(node)
        return waits

    def _make_room(self, tier: int, component: int, short: int) -> None:
        queue, pool = self.queues[tier][component], self.pools[tier][component]
        freed = self.nothing_freed()
        mine = freed[tier][component]
        victims: list[int] = []
        while len(mine) < short:
            victim = queue.next_victim()
            if victim is None:
                raise InternalError(f"{pool.name} pages that could be evicted are miscounted")
            surplus = len(mine) + victim.width - short
            if surplus > 0 and not component:
                self._split(victim, surplus)
            victims.append(victim.id)
            self._evict(victim, tier, component, freed)
        self._journal.record("evict", pool.name, victims)
        self.give_back(freed)

    def _evict(self, victim: Node, tier: int, component: int, freed: Freed) -> None:
        if not component:
            self.detach_all(victim, tier, freed)
            self.remove_if_dead(victim)
            return
        pages = self.detach(victim, tier, component)
        freed[tier][component].extend(pages)
        if not victim.children:
            self.cascade(victim, freed)

    def _offer(self, node: Node, tier: int, component: int) -> None:
        if node.values[tier][component] is not None:
            self.queues[tier][component].offer(node)
            if not component and self.limits.are_set:
                self.limits.offer(node, tier)


def _pool_name(tier: int, pool: str, index: int) -> str:
    return f"{TIER_NAMES[tier]} {pool}" if index else TIER_NAMES[tier]
