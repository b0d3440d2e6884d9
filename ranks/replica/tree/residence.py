"""Residence: the pools, the pages that nodes own of them, and the eviction of those.

The pages of a pool are free, or belong to a node of the tree, a request or an operation. What a node
owns may be evicted unless something holds it: the pages of full attention from the leaves up, with
everything that other components have on that tier beside them; those of other components wherever
they are, which leaves a tombstone. What a tombstone has made useless leaves with it (the cascade),
as far up as nothing holds it.

What may leave does so in the order of the eviction policy, so far as others need the room; what a
namespace keeps beyond its limits leaves by itself. Under write-back what leaves the device is saved
first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....errors import InternalError
from ...protocol.config import NamespaceLimit, WritePolicy
from ...protocol.eviction_policies import find_policy
from ...protocol.notices import Cause, Removed, Stored, Tier
from ..core.basis import Basis, Clock
from ..core.pages import PagePool, PageRun, page_run
from .backlog import Backlog
from .eviction import EvictionQueue
from .holds import Holds, Receipt
from .limits import Limits
from .node import DEVICE, HOST, Node
from .tree import Tree

TIERS = (DEVICE, HOST)
TIER_NAMES = (Tier.DEVICE, Tier.HOST)


@dataclass(slots=True)
class Leaving:
    """Pages that have left the tree together, and are on their way to somebody else."""

    cause: Cause
    runs: tuple[list[PageRun], list[PageRun]]
    """The pages by tier and component."""
    keys: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    """The keys of full attention's pages by tier, where the cache was told to name pages."""
    victims: list[int] = field(default_factory=list[int])
    """The nodes that were chosen to leave."""


class Residence:
    """The pools of both tiers, the pages that nodes own, and the order in which those leave."""

    def __init__(
        self,
        basis: Basis,
        tree: Tree,
        *,
        emptied: Callable[[Node], None],
        split: Callable[[Node, int], None],
    ) -> None:
        """`emptied` is told of a root that has no children any more; `split` cuts a node."""
        config = basis.config
        self._tree = tree
        self.components = tree.components
        self._others = tree.components[1:]
        self._where_others = [(tier, each.index) for each in self._others for tier in TIERS]
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._names_pages = config.names_pages
        self._emptied = emptied
        self._split = split
        self.saves: Callable[[Node, int], bool] | None = None
        """Under write-back: begins to back up a node whose pages of a component are to leave the
        device, and says whether they have to stay for it."""
        self.pools = tuple(
            tuple(
                PagePool(_pool_name(tier, component.pool, component.index), pages, basis.journal)
                for component, pages in zip(self.components, config.pool_pages(tier), strict=True)
            )
            for tier in TIERS
        )
        """The pools by tier and component."""
        self.tree_pages = tuple([0] * len(self.components) for _ in TIERS)
        """By tier and component: pages that nodes of the tree own."""
        self.changed: dict[Node, None] = {}
        """Nodes that something may have divided from their neighbours, and perhaps no longer does."""
        self.holds = Holds(len(self.components), self._was_let_go, self.changed)
        self.not_on_host, self.not_stored = self.backlogs = (
            Backlog(self.changed),
            Backlog(self.changed),
        )
        """Paths that wait for room in host memory, and paths that wait for the store."""
        policy = find_policy(config.eviction)
        self._grade = policy.grade
        selective = config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._hits_counted = config.selective_hits if selective else 0
        self.queues = tuple(
            tuple(
                EvictionQueue(policy, partial(self.evictable, tier, each.index))
                for each in self.components
            )
            for tier in TIERS
        )
        """By tier and component: the nodes whose pages may be evicted, in that order."""
        self.came_to_host: Callable[[Node], None] | None = None
        """Called with each node that gets pages of a component in host memory."""
        count = len(self.components)
        on_tier = (1 << count) - 1
        self._bits = 1, 1 << count
        """By tier: the bit of `Node.there` of full attention."""
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
        """Return how many pages can be taken: free ones, and those that may be evicted."""
        kept = self.holds.kept_pages[tier][component]
        return self.pools[tier][component].free + self.tree_pages[tier][component] - kept

    def attach(self, node: Node, tier: int, component: int, pages: PageRun, cause: Cause) -> None:
        """Give a node its pages of a component on a tier; they belong to it from now on."""
        values, parent = node.values[tier], node.parent
        kind, count = self.components[component], len(pages)
        if (
            values[component] is not None
            or count != kind.pages_of(node.width)
            or (component and values[0] is None)
            or parent is None
        ):
            raise InternalError(f"node {node.id} cannot take {count} pages on tier {tier}")
        values[component] = pages
        if len(parent.children) == 1 or len(node.children) == 1:
            self.changed[node] = None
        node.there |= 1 << (tier * len(values) + component)
        self.tree_pages[tier][component] += count
        if tier == HOST and self.came_to_host is not None:
            self.came_to_host(node)
        limited = not component and self.limits.are_set
        queue = self.queues[tier][component]
        if not component:
            parent.occupied_children[tier] += 1
            # It is a leaf of its tier no more, and nobody tells the queue of its uses.
            queue.discard(parent)
            if limited:
                self.limits.count(node, tier, count)
        if node.held[tier][component]:
            self.holds.kept_pages[tier][component] += count
        elif component or not node.occupied_children[tier]:
            queue.enter(node)
            if limited:
                self.limits.try_enter(node, tier)
        told = Stored(TIER_NAMES[tier], kind.pool, count, cause)
        if self._names_pages and not component:
            keys = tuple(self._tree.keys(node))
            after, tokens = self._tree.key_before(node), bytes(node.tokens)
            told = told._replace(after=after, keys=keys, tokens=tokens)
        self._outbox.notices.append(told)

    def detach(self, node: Node, tier: int, component: int, leaving: Leaving) -> None:
        """Remove a node's pages of a component on a tier, and note them as leaving.

        Those of full attention are the last to leave a tier.
        """
        values = node.values[tier]
        pages = values[component]
        assert pages is not None
        values[component] = None
        self.changed[node] = None
        node.there &= ~(1 << (tier * len(values) + component))
        if node.held[tier][component]:
            self.holds.kept_pages[tier][component] -= len(pages)
        self.tree_pages[tier][component] -= len(pages)
        self.queues[tier][component].discard(node)
        if not component:
            parent = node.parent
            assert parent is not None
            parent.occupied_children[tier] -= 1
            self.limits.count(node, tier, -len(pages))
            if not parent.occupied_children[tier]:
                self._try_enter(parent, tier, 0)
            self._name(node, tier, leaving)
        leaving.runs[tier][component].extend(pages)

    def detach_all(self, node: Node, tier: int, leaving: Leaving) -> None:
        """Remove all that a node has on a tier, where nothing holds it, and note it as leaving.

        As `detach` for each component, in one: nearly all evictions are this.
        """
        values, owned, queues = node.values[tier], self.tree_pages[tier], self.queues[tier]
        parent, base = node.parent, values[0]
        if base is None or parent is None:
            return
        into = leaving.runs[tier]
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
            self._try_enter(parent, tier, 0)
        self._name(node, tier, leaving)

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

    def evict_all(self, tier: int, nodes: Iterable[Node], cause: Cause) -> None:
        """Evict what nothing holds on a tier of these nodes; each comes before its parent."""
        leaving = self.leaving(cause)
        for node in nodes:
            if self.evictable(tier, 0, node):
                self._evict(node, tier, 0, leaving)
        self.give_back(leaving, tier)

    def enforce_limits(self, now_ms: int) -> None:
        """Evict what namespaces keep beyond their quotas or times, as far as nothing holds it."""
        if not self.limits.are_set:
            return
        for tier in TIERS:
            leaving = self.leaving(Cause.LIMIT)
            while (over := self.limits.over_quota(tier)) is not None:
                victim, surplus = over
                if surplus < victim.width:
                    # As much of the run as the quota allows stays.
                    self._split(victim, victim.width - surplus)
                if tier == DEVICE and self.saves is not None:
                    self.limits.leave(victim, tier)
                    self.changed[victim] = None
                    if self.saves(victim, 0):
                        continue
                self._evict(victim, tier, 0, leaving)
            for victim in self.limits.expired(tier, now_ms):
                self._evict(victim, tier, 0, leaving)
            if leaving.victims:
                self.give_back(leaving, tier)

    def leaving(self, cause: Cause) -> Leaving:
        """Return an empty collection for pages that leave the tree for one cause."""
        runs = ([page_run() for _ in self.components], [page_run() for _ in self.components])
        return Leaving(cause, runs)

    def tell_of(self, leaving: Leaving) -> None:
        """Put out notices of what has left the tree."""
        for tier, runs in enumerate(leaving.runs):
            for component, pages in zip(self.components, runs, strict=True):
                if pages:
                    keys = () if component.index else tuple(leaving.keys[tier])
                    told = Removed(
                        TIER_NAMES[tier], component.pool, len(pages), leaving.cause, keys
                    )
                    self._outbox.notices.append(told)

    def give_back(self, leaving: Leaving, tier: int, component: int = 0) -> None:
        """Put what has left on the free lists; pages of this tier and component were wanted."""
        self._journal.record("evict", self.pools[tier][component].name, leaving.victims)
        for pools, runs in zip(self.pools, leaving.runs, strict=True):
            for pool, pages in zip(pools, runs, strict=True):
                pool.give_back(pages)
        self.tell_of(leaving)

    def are_divided(self, upper: Node, lower: Node) -> bool:
        """Say whether something keeps a node and its only child apart.

        Policies may, since they let each leave, or back it up, by how often it was used.
        """
        if self._tree.divided(upper, lower) or self._grade(upper) != self._grade(lower):
            return True
        most = self._hits_counted
        if min(upper.hits, most) != min(lower.hits, most):
            return True
        return self.limits.divide(upper, lower)

    def merge(self, upper: Node, lower: Node) -> bool:
        """Make one node of two, which is `lower`, unless something divides them; say whether it did."""
        if self.are_divided(upper, lower):
            return False
        for tier in TIERS:
            for queue in self.queues[tier]:
                queue.discard(upper)
            if self.limits.are_set:
                self.limits.discard(upper, tier)
        self._tree.merge(upper, lower)
        for tier in TIERS:
            for component, run in enumerate(lower.values[tier]):
                if run is not None:
                    self._try_enter(lower, tier, component)
        return True

    def was_split(self, upper: Node) -> None:
        """Take note of the upper half of a node that was cut."""
        self.changed[upper] = None
        if self.limits.are_set:
            self.limits.was_split(upper)
        for tier in TIERS:
            for component, run in enumerate(upper.values[tier]):
                if run is not None:
                    self._try_enter(upper, tier, component)

    def limit(self, limit: NamespaceLimit) -> None:
        """Give a namespace another limit, or none; see `Limits.changed`."""
        for tier in TIERS:
            # They may have been kept apart for that they were leaving, and may leave no more.
            self.changed.update(dict.fromkeys(self.limits.leaving(tier)))
        self.limits = self.limits.changed(limit, self._tree.nodes())

    def touch(self, node: Node, clock: Clock, hits: int, priority: int) -> None:
        """Mark the path to `node` as used now."""
        uses, time_ms, changed = clock.uses, clock.agreed_ms, self.changed
        on_device, on_host = self.queues[DEVICE][0], self.queues[HOST][0]
        device_bit, host_bit = self._bits
        each, above = node, node.parent
        while above is not None:
            if len(above.children) == 1 and not _used_alike(above, each):
                # What was used alike until now is as near to being one node as it was.
                changed[each] = None
            each.last_access = uses
            each.used_ms = time_ms
            if hits:
                each.hits += hits
            if priority:
                each.priority = max(each.priority, priority)
            # Of full attention only the leaf of a tier is in its queue.
            there, below = each.there, each.occupied_children
            if there & device_bit and not below[DEVICE]:
                on_device.used(each)
            if there & host_bit and not below[HOST]:
                on_host.used(each)
            each, above = above, above.parent
        if self._where_others:
            # Of the others every node is, and the one that is used last leaves last.
            for each in node.path_down():
                for tier, component in self._where_others:
                    if each.values[tier][component] is not None:
                        self.queues[tier][component].used(each)
        if self.limits.are_set:
            changed.update((each, None) for each in node.path_down() if self.limits.used(each))

    def stay(self, node: Node, tier: int) -> None:
        """Let nothing of the path to `node` leave a tier for its namespace's limits for now."""
        for each in node.path():
            if self.limits.stay(each, tier):
                self.changed[each] = None

    def hold(self, tier: int, node: Node, *, requested: bool = False) -> list[Receipt]:
        """Lock or pin everything that a match ending at `node` needs.

        `requested` leaves out what a request does not use where it lies.
        """
        receipts: list[Receipt] = []
        if node.parent is None:
            # A match of nothing needs nothing, and a root is not to be kept for it.
            return receipts
        receipts.append(self.holds.acquire(tier, 0, node))
        for component in self._others:
            if component.held_by_requests or not requested:
                start = component.needed_from(node.end) if component.per_page else node.start
                receipts.append(self.holds.acquire(tier, component.index, node, start))
        return receipts

    def extend(self, receipts: Iterable[Receipt], node: Node) -> list[Receipt]:
        """Let locks or pins go on down to `node`, below where they end; they begin where it needs."""
        extended: list[Receipt] = []
        for receipt in receipts:
            component = self.components[receipt.component]
            start = component.needed_from(node.end) if component.per_page else node.start
            if start <= receipt.start:
                extended.append(self.holds.extend(receipt, node))
            else:
                extended.append(self.holds.acquire(receipt.tier, component.index, node, start))
                self.holds.release(receipt)
        return extended

    def release(self, receipts: Iterable[Receipt]) -> None:
        """Give back locks and pins."""
        for receipt in receipts:
            self.holds.release(receipt)

    def remove_if_dead(self, node: Node) -> bool:
        """Take a node out of the tree that has pages on no tier and that nothing holds.

        Says whether it did. A tombstone that is held leaves by `prune` once it is let go.
        """
        parent = node.parent
        if node.there or node.children or parent is None or node.hold_count:
            self.changed[node] = None
            return False
        self._tree.remove(node)
        for backlog in self.backlogs:
            backlog.left(node, parent)
        if len(parent.children) == 1:
            self.changed[parent] = None
        if parent.parent is None and not parent.children:
            self._emptied(parent)
        return True

    def prune(self, node: Node) -> None:
        """Take out of the tree what of the path to `node` has no pages, no children and no holds."""
        while not (node.there or node.children or node.hold_count or node.parent is None):
            parent = node.parent
            self.remove_if_dead(node)
            node = parent

    def cascade(self, node: Node, leaving: Leaving) -> None:
        """Remove `node`, and then its ancestors, as far as no match can end there any more.

        It stops at whatever is locked or pinned on either tier, is worked on by an operation, or has
        children: a parent under a prefetch or backup must not vanish (incident D).
        """
        while node.parent is not None and not (node.children or node.hold_count or node.marks):
            if self._tree.is_whole(node):
                return
            parent = node.parent
            for tier in TIERS:
                self.detach_all(node, tier, leaving)
            self.remove_if_dead(node)
            node = parent

    def _can_find(self, tier: int, counts: Sequence[int]) -> bool:
        return all(count <= self.available(tier, index) for index, count in enumerate(counts))

    def _have_to_wait(self, counts: Sequence[int], saves: Callable[[Node, int], bool]) -> bool:
        """Say whether something that is to leave the device is being backed up instead."""
        waits = False
        for component, count in zip(self.components, counts, strict=True):
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
                queue.try_enter(node)
        return waits

    def _make_room(self, tier: int, component: int, short: int) -> None:
        queue, pool = (
            self.queues[tier][component],
            self.pools[tier][component],
        )
        leaving = self.leaving(Cause.ROOM)
        mine = leaving.runs[tier][component]
        while len(mine) < short:
            victim = queue.next_victim()
            if victim is None:
                raise InternalError(f"{pool.name} pages that could be evicted are miscounted")
            surplus = len(mine) + victim.width - short
            if surplus > 0 and not component:
                self._split(victim, surplus)
            self._evict(victim, tier, component, leaving)
        self.give_back(leaving, tier, component)

    def _evict(self, victim: Node, tier: int, component: int, leaving: Leaving) -> None:
        leaving.victims.append(victim.id)
        if not component:
            self.detach_all(victim, tier, leaving)
            self.remove_if_dead(victim)
            return
        self.detach(victim, tier, component, leaving)
        if not victim.children:
            self.cascade(victim, leaving)

    def _name(self, node: Node, tier: int, leaving: Leaving) -> None:
        if self._names_pages:
            leaving.keys[tier].extend(self._tree.keys(node))

    def _was_let_go(self, node: Node, tier: int, component: int) -> None:
        """Let a node leave in its turn, which nothing holds any more."""
        if not component:
            if self.limits.are_set and self.limits.stay(node, tier):
                self.changed[node] = None
            if node.occupied_children[tier]:
                return
        self._try_enter(node, tier, component)

    def _try_enter(self, node: Node, tier: int, component: int) -> None:
        if node.values[tier][component] is not None:
            self.queues[tier][component].try_enter(node)
            if not component and self.limits.are_set:
                self.limits.try_enter(node, tier)


def _used_alike(one: Node, other: Node) -> bool:
    """Say whether two nodes have been used at the same times, as often and by the same priority."""
    return (
        one.last_access == other.last_access
        and one.used_ms == other.used_ms
        and one.hits == other.hits
        and one.priority == other.priority
        and one.is_saved == other.is_saved
    )


def _pool_name(tier: int, pool: str, index: int) -> str:
    return f"{TIER_NAMES[tier]} {pool}" if index else TIER_NAMES[tier]
