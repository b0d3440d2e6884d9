"""The page allocator: the page pools, the pages that nodes own, and eviction.

A page is free, or belongs to a tree node, a request or an operation. A node's pages may be evicted
unless locked or pinned. Full attention is evicted from the leaves up, with the node's other components
on that tier. Other components are evicted at any node and leave a tombstone. Ancestors made useless by
a tombstone are evicted with it (the cascade), up to the first held node.

The eviction policy decides the order when an allocation needs pages. Pages beyond a namespace's limits
are evicted even if no allocation needs them. Under write-back, pages are saved before they leave the
device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....errors import InternalError
from ...protocol.config import NamespaceLimit, WritePolicy
from ...protocol.events import Cause, Removed, Stored, Tier
from ...protocol.eviction_policies import find_policy
from ..core.pages import PagePool, PageRun, page_run
from ..core.replica_parts import Clock, ReplicaParts
from .backlog import Backlog
from .eviction import EvictionQueue
from .limits import Limits
from .node import DEVICE, HOST, Node
from .ref_counts import LockHandle, RefCounts
from .tree import Tree

TIERS = (DEVICE, HOST)
TIER_NAMES = (Tier.DEVICE, Tier.HOST)


@dataclass(slots=True)
class LeavingPages:
    """Pages that were removed from the tree together and are about to be freed."""

    cause: Cause
    runs: tuple[list[PageRun], list[PageRun]]
    """Pages that have left the tree, by tier and component."""
    keys: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    """By tier: the keys of the removed full-attention pages, if events are to name pages."""
    victims: list[int] = field(default_factory=list[int])
    """The ids of the nodes that were chosen for eviction."""


class PageAllocator:
    """The pools of both tiers, the pages that nodes own, and the eviction order."""

    def __init__(
        self,
        basis: ReplicaParts,
        tree: Tree,
        *,
        emptied: Callable[[Node], None],
        split: Callable[[Node, int], None],
    ) -> None:
        """`emptied` is called with each root that has lost its last child; `split` splits a node."""
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
        """Under write-back: a callback that is called before a node's pages of a component leave the
        device.

        It starts a backup if needed, and returns whether the pages must stay on the device for the
        backup.
        """
        self.pools = tuple(
            tuple(
                PagePool(_pool_name(tier, component.pool, component.index), pages, basis.journal)
                for component, pages in zip(self.components, config.pool_pages(tier), strict=True)
            )
            for tier in TIERS
        )
        self.tree_pages = tuple([0] * len(self.components) for _ in TIERS)
        """By tier and component: the number of pages that tree nodes own."""
        self.changed: dict[Node, None] = {}
        """Nodes that changed and so may now be mergeable with a neighbour."""
        self.ref_counts = RefCounts(len(self.components), self._was_unlocked, self.changed)
        self.not_on_host, self.not_stored = self.backlogs = (
            Backlog(self.changed),
            Backlog(self.changed),
        )
        """Backlogs of paths that wait for room in host memory, and of paths that wait for the store."""
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
        """By tier and component: the nodes whose pages may be evicted, in eviction order."""
        self.came_to_host: Callable[[Node], None] | None = None
        """Called with each node that gets pages of a component in host memory."""
        count = len(self.components)
        on_tier = (1 << count) - 1
        self._bits = 1, 1 << count
        """By tier: the bit of full attention in `Node.there`, the bitmap of the components that a node
        has."""
        self._off_tier = (~on_tier, ~(on_tier << count))
        """By tier: a mask that clears the bits of that tier in `Node.there`, the bitmap of the
        components that a node has."""
        self.limits = Limits(config.limits, lambda tier, node: self.evictable(tier, 0, node))

    def evictable(self, tier: int, component: int, node: Node) -> bool:
        """Return whether a node's pages of a component may be evicted from a tier.

        They must not be locked or pinned there; for full attention the node must be a leaf of that
        tier.
        """
        if node.values[tier][component] is None or node.held[tier][component]:
            return False
        return bool(component) or not node.occupied_children[tier]

    def available(self, tier: int, component: int) -> int:
        """Return how many pages can be allocated: free pages and evictable ones."""
        kept = self.ref_counts.kept_pages[tier][component]
        return self.pools[tier][component].free + self.tree_pages[tier][component] - kept

    def attach(self, node: Node, tier: int, component: int, pages: PageRun, cause: Cause) -> None:
        """Make a node the owner of `pages` of a component on a tier; the event reports `cause`."""
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
            # The parent is no longer a leaf of its tier, so remove it from the queue of full attention.
            queue.discard(parent)
            if limited:
                self.limits.count(node, tier, count)
        if node.held[tier][component]:
            self.ref_counts.kept_pages[tier][component] += count
        elif component or not node.occupied_children[tier]:
            queue.enter(node)
            if limited:
                self.limits.try_enter(node, tier)
        event = Stored(TIER_NAMES[tier], kind.pool, count, cause)
        if self._names_pages and not component:
            keys = tuple(self._tree.keys(node))
            after, tokens = self._tree.key_before(node), bytes(node.tokens)
            event = event._replace(after=after, keys=keys, tokens=tokens)
        self._outbox.events.append(event)

    def detach(self, node: Node, tier: int, component: int, leaving: LeavingPages) -> None:
        """Remove a node's pages of a component from a tier, and add them to `leaving`.

        `leaving` are freed later. A node's full-attention pages must be removed after its other pages
        on that tier.
        """
        values = node.values[tier]
        pages = values[component]
        assert pages is not None
        values[component] = None
        self.changed[node] = None
        node.there &= ~(1 << (tier * len(values) + component))
        if node.held[tier][component]:
            self.ref_counts.kept_pages[tier][component] -= len(pages)
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

    def detach_all(self, node: Node, tier: int, leaving: LeavingPages) -> None:
        """Remove from a tier all pages of a node without locks and pins; add them to `leaving`.

        `leaving` are freed later. Equivalent to `detach` for each component, but faster: nearly all
        evictions call this method.
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
        """Return whether each pool has enough free pages, so that `take` need not evict."""
        return all(map(PagePool.has, self.pools[tier], counts))

    def take(self, tier: int, counts: Sequence[int]) -> list[PageRun] | None:
        """Allocate pages of each component, evicting in policy order if needed.

        Returns None, and evicts nothing, if too few pages can be found, or if pages must be backed up
        before they leave the device.
        """
        pools = self.pools[tier]
        if self.has_free(tier, counts):
            return list(map(PagePool.take, pools, counts))
        if not self._can_find(tier, counts):
            return None
        # Count the evictable pages again after backups have begun, because a backup locks whole nodes
        # even if it copies only a part.
        saves = self.saves if tier == DEVICE else None
        if saves and (self._have_to_wait(counts, saves) or not self._can_find(tier, counts)):
            return None
        for index, count in enumerate(counts):
            if pools[index].free < count:
                self._make_room(tier, index, count - pools[index].free)
        return list(map(PagePool.take, pools, counts))

    def evict_all(self, tier: int, nodes: Iterable[Node], cause: Cause) -> None:
        """Evict the pages of `nodes` on a tier unless locked or pinned.

        `nodes` lists children before their parents.
        """
        leaving = self.leaving(cause)
        for node in nodes:
            if self.evictable(tier, 0, node):
                self._evict(node, tier, 0, leaving)
        self.give_back(leaving, tier)

    def enforce_limits(self, now_ms: int) -> None:
        """Evict pages of namespaces that exceed their quota or time to live, except held pages."""
        if not self.limits.are_set:
            return
        for tier in TIERS:
            leaving = self.leaving(Cause.LIMIT)
            while (over := self.limits.over_quota(tier)) is not None:
                victim, surplus = over
                if surplus < victim.width:
                    # The node has more pages than must be evicted, so split it and evict only its end.
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

    def leaving(self, cause: Cause) -> LeavingPages:
        """Return an empty collection for pages that will leave the tree because of `cause`."""
        runs = ([page_run() for _ in self.components], [page_run() for _ in self.components])
        return LeavingPages(cause, runs)

    def publish_removed(self, leaving: LeavingPages) -> None:
        """Publish events for pages that have left the tree."""
        for tier, runs in enumerate(leaving.runs):
            for component, pages in zip(self.components, runs, strict=True):
                if pages:
                    keys = () if component.index else tuple(leaving.keys[tier])
                    event = Removed(
                        TIER_NAMES[tier], component.pool, len(pages), leaving.cause, keys
                    )
                    self._outbox.events.append(event)

    def give_back(self, leaving: LeavingPages, tier: int, component: int = 0) -> None:
        """Free the pages in `leaving`; record in the journal which pool needed the eviction."""
        self._journal.record("evict", self.pools[tier][component].name, leaving.victims)
        for pools, runs in zip(self.pools, leaving.runs, strict=True):
            for pool, pages in zip(pools, runs, strict=True):
                pool.give_back(pages)
        self.publish_removed(leaving)

    def are_divided(self, upper: Node, lower: Node) -> bool:
        """Return whether a node and its only child must stay separate.

        They must if the tree keeps them separate (`divided`), or if their eviction grades or hit counts
        differ. They must also stay separate if exactly one of them is being backed up before its
        eviction.
        """
        if self._tree.divided(upper, lower) or self._grade(upper) != self._grade(lower):
            return True
        most = self._hits_counted
        if min(upper.hits, most) != min(lower.hits, most):
            return True
        return self.limits.divide(upper, lower)

    def merge(self, upper: Node, lower: Node) -> bool:
        """Merge `upper` into its only child `lower` if nothing forbids it; return whether merged."""
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
        """Register the upper half of a node that was split, for eviction and for merging."""
        self.changed[upper] = None
        if self.limits.are_set:
            self.limits.was_split(upper)
        for tier in TIERS:
            for component, run in enumerate(upper.values[tier]):
                if run is not None:
                    self._try_enter(upper, tier, component)

    def limit(self, limit: NamespaceLimit) -> None:
        """Set or remove a namespace's limit; see `Limits.changed`."""
        for tier in TIERS:
            # The new limits may allow merges of nodes that are being backed up before their eviction,
            # so check these nodes again.
            self.changed.update(dict.fromkeys(self.limits.leaving(tier)))
        self.limits = self.limits.changed(limit, self._tree.nodes())

    def touch(self, node: Node, clock: Clock, hits: int, priority: int) -> None:
        """Mark the path to `node` as used now.

        Adds `hits` to each node's hits, and raises priorities below `priority` to `priority`.
        """
        uses, time_ms, changed = clock.uses, clock.agreed_ms, self.changed
        on_device, on_host = self.queues[DEVICE][0], self.queues[HOST][0]
        device_bit, host_bit = self._bits
        each, above = node, node.parent
        while above is not None:
            if len(above.children) == 1 and not _used_alike(above, each):
                # This use may make the uses of a node and its only child equal, so check whether the
                # two can be merged. If their uses were equal before, the two are separate for another
                # reason.
                changed[each] = None
            each.last_access = uses
            each.used_ms = time_ms
            if hits:
                each.hits += hits
            if priority:
                each.priority = max(each.priority, priority)
            # A tier's queue of full attention contains only leaves of the tier, so move only leaves.
            there, below = each.there, each.occupied_children
            if there & device_bit and not below[DEVICE]:
                on_device.used(each)
            if there & host_bit and not below[HOST]:
                on_host.used(each)
            each, above = above, above.parent
        if self._where_others:
            # For other components every node is in the queue. Mark the deepest node as used last, so
            # that it is evicted last.
            for each in node.path_down():
                for tier, component in self._where_others:
                    if each.values[tier][component] is not None:
                        self.queues[tier][component].used(each)
        if self.limits.are_set:
            changed.update((each, None) for each in node.path_down() if self.limits.used(each))

    def stay(self, node: Node, tier: int) -> None:
        """Keep on a tier the nodes on the path to `node` whose eviction waits for their backup."""
        for each in node.path():
            if self.limits.stay(each, tier):
                self.changed[each] = None

    def hold(self, tier: int, node: Node, *, requested: bool = False) -> list[LockHandle]:
        """Lock (device) or pin (host) everything that a match at `node` needs; return the lock handles.

        If `requested`, leaves out components that requests do not use in place.
        """
        lock_handles: list[LockHandle] = []
        if node.parent is None:
            # An empty match needs no locks, and must not keep the root.
            return lock_handles
        lock_handles.append(self.ref_counts.acquire(tier, 0, node))
        for component in self._others:
            if component.held_by_requests or not requested:
                start = component.needed_from(node.end) if component.per_page else node.start
                lock_handles.append(self.ref_counts.acquire(tier, component.index, node, start))
        return lock_handles

    def extend(self, lock_handles: Iterable[LockHandle], node: Node) -> list[LockHandle]:
        """Extend locks or pins to `node`, which lies below their end; return the new lock handles.

        Each new lock or pin begins at the first position that a match ending at `node` needs of the
        lock's component.
        """
        extended: list[LockHandle] = []
        for lock_handle in lock_handles:
            component = self.components[lock_handle.component]
            start = component.needed_from(node.end) if component.per_page else node.start
            if start <= lock_handle.start:
                extended.append(self.ref_counts.extend(lock_handle, node))
            else:
                extended.append(
                    self.ref_counts.acquire(lock_handle.tier, component.index, node, start)
                )
                self.ref_counts.release(lock_handle)
        return extended

    def release(self, lock_handles: Iterable[LockHandle]) -> None:
        """Release locks and pins."""
        for lock_handle in lock_handles:
            self.ref_counts.release(lock_handle)

    def remove_if_dead(self, node: Node) -> bool:
        """Remove from the tree a node without pages, children, locks and pins; return whether removed.

        A held tombstone is removed by `prune` after its release.
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
        """Remove nodes without pages, children, locks and pins from the end of the path to `node`."""
        while not (node.there or node.children or node.hold_count or node.parent is None):
            parent = node.parent
            self.remove_if_dead(node)
            node = parent

    def cascade(self, node: Node, leaving: LeavingPages) -> None:
        """Evict `node` and then its ancestors, up to the first one at which a match can still end.

        Stops at a node that is locked, pinned, marked by an operation, or has children, because a
        parent under a prefetch or backup must not vanish (incident D).
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
        """Back up device pages before their eviction; return whether the eviction must wait."""
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
                raise InternalError(f"fewer {pool.name} pages are evictable than counted")
            surplus = len(mine) + victim.width - short
            if surplus > 0 and not component:
                self._split(victim, surplus)
            self._evict(victim, tier, component, leaving)
        self.give_back(leaving, tier, component)

    def _evict(self, victim: Node, tier: int, component: int, leaving: LeavingPages) -> None:
        leaving.victims.append(victim.id)
        if not component:
            self.detach_all(victim, tier, leaving)
            self.remove_if_dead(victim)
            return
        self.detach(victim, tier, component, leaving)
        if not victim.children:
            self.cascade(victim, leaving)

    def _name(self, node: Node, tier: int, leaving: LeavingPages) -> None:
        if self._names_pages:
            leaving.keys[tier].extend(self._tree.keys(node))

    def _was_unlocked(self, node: Node, tier: int, component: int) -> None:
        """Make a node evictable again after its last lock or pin was released."""
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
    """Return whether two nodes have equal uses: last use, hits, priority and write-back backup."""
    return (
        one.last_access == other.last_access
        and one.used_ms == other.used_ms
        and one.hits == other.hits
        and one.priority == other.priority
        and one.is_saved == other.is_saved
    )


def _pool_name(tier: int, pool: str, index: int) -> str:
    return f"{TIER_NAMES[tier]} {pool}" if index else TIER_NAMES[tier]
