"""Check the invariants of the replicated state by recomputing its counts and sums from scratch.

The numbers of the invariants are those of `docs/protocol.md`. A violation is a bug in Lockstep.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from ...coordinator.operation import Phase, Queue
from ...coordinator.prefetch_slots import PrefetchSlot
from .operations.kinds import LoadBack, Moving, Persist, Prefetch, Resume
from .operations.requests import Stage
from .replica import Replica
from .tree.components import Component
from .tree.node import DEVICE, HOST, Node
from .tree.page_allocator import TIER_NAMES, TIERS, PageAllocator
from .tree.ref_counts import LockHandle
from .tree.tree import Tree

_COPYING = (Stage.LOADING, Stage.STOPPING, Stage.SAVING)


class InvariantViolation(AssertionError):
    """An invariant of the replicated state does not hold."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(number, sentence)
        self.number = number
        self.sentence = sentence

    def __str__(self) -> str:
        return f"invariant {self.number}: {self.sentence}"


def check(replica: Replica) -> None:
    """Raise `InvariantViolation` for the first invariant that does not hold."""
    prefixes = replica.prefixes
    nodes = list(prefixes.tree.nodes())
    _check_roots(replica)
    pinned = {id(node) for pin in replica.pinning.pins.values() for node in pin.node.path()}
    for node in nodes:
        _check_node(prefixes.tree, node)
        if id(node) not in pinned:
            _check_locked(node)
        _check_whole(prefixes.allocator, node)
    _check_counts(prefixes.tree, prefixes.allocator, nodes)
    _check_operations(replica, nodes)
    _check_holds(replica, nodes)
    _check_eviction(prefixes.allocator, prefixes.components, nodes)
    _check_ownership(replica, nodes)
    _check_bounds(replica)


def _require(condition: bool, number: int, sentence: str) -> None:
    if not condition:
        raise InvariantViolation(number, sentence)


def _check_roots(replica: Replica) -> None:
    for root in replica.prefixes.tree.roots.values():
        place = root.place
        namespace = place.namespace
        _require(root.parent is None, 1, f"the root of {namespace!r} has a parent")
        empty = all(run is None for tier in TIERS for run in root.values[tier])
        _require(empty and not root.width, 1, f"the root of {namespace!r} holds pages")
        used = bool(root.children) or place in replica.prefixes.users
        _require(used, 2, f"the root of {namespace!r} has no children and no requests")


def _check_node(tree: Tree, node: Node) -> None:
    name, parent = f"node {node.id}", node.parent
    assert parent is not None
    first = bytes(node.tokens[: tree.page_bytes])
    _require(node.width > 0, 1, f"{name} has an empty key")
    _require(len(node.tokens) == node.width * tree.page_bytes, 1, f"{name} is misaligned")
    hangs = node.first == first and parent.children.get(first) is node
    _require(hangs, 1, f"{name} is not a child of its parent")
    _require(node.start == parent.end, 1, f"{name} does not continue its parent")
    for tier in TIERS:
        _check_values(tree, node, tier)
        if parent.parent is None:
            continue
        if node.values[tier][0] is not None and parent.values[tier][0] is None:
            _violated(4, node, tier, "has pages and its parent has none")
    held = sum(map(sum, node.held))
    _require(node.hold_count == held, 5, f"{name} has a wrong sum of locks and pins")
    _require(node.has(0) or bool(held), 2, f"{name} is dead")


def _check_whole(allocator: PageAllocator, node: Node) -> None:
    """Check that a node and its only child are merged, unless the two must stay separate (rule R15)."""
    parent = node.parent
    if parent is not None and parent.parent is not None and len(parent.children) == 1:
        divided = allocator.are_divided(parent, node)
        _require(divided, 11, f"nothing divides node {node.id} from node {parent.id} above it")


def _check_values(tree: Tree, node: Node, tier: int) -> None:
    values, held = node.values[tier], node.held[tier]
    base, width = values[0], node.width
    there = node.there >> (tier * len(values))
    # Build error texts only on failure, because this check runs for every node after every step.
    for component, run, count in zip(tree.components, values, held, strict=True):
        index = component.index
        if run is None:
            if there >> index & 1:
                _violated(6, node, tier, f"has a wrong presence bit for its {component.pool} pages")
        else:
            if not there >> index & 1:
                _violated(6, node, tier, f"has a wrong presence bit for its {component.pool} pages")
            if len(run) != component.pages_of(width):
                _violated(7, node, tier, f"has {component.pool} pages of another length")
            if base is None:
                _violated(3, node, tier, f"has {component.pool} pages without full attention")
        if count < 0:
            _violated(5, node, tier, "has a negative count of locks or pins")
        if count and not held[0]:
            _violated(5, node, tier, f"is held for {component.pool} and not for full attention")
    on_tier = 0
    for child in node.children.values():
        on_tier += child.values[tier][0] is not None
    if node.occupied_children[tier] != on_tier:
        _violated(6, node, tier, "has a wrong count of children with pages")


def _check_locked(node: Node) -> None:
    """Check that a node locked on the device has device pages, or that a copy in flight fills them.

    Callers skip nodes that a named pin covers, because a pin may lock a node before its pages are on
    the device.
    """
    if node.held[DEVICE][0] and node.values[DEVICE][0] is None and not node.is_to_have(DEVICE, 0):
        _violated(5, node, DEVICE, "is locked without pages, and no copy in flight fills it")


def _violated(number: int, node: Node, tier: int, what: str) -> NoReturn:
    raise InvariantViolation(number, f"node {node.id} {what}, on the {TIER_NAMES[tier]}")


def _check_counts(tree: Tree, allocator: PageAllocator, nodes: list[Node]) -> None:
    for tier in TIERS:
        for index in range(len(tree.components)):
            runs = [(node, run) for node in nodes if (run := node.values[tier][index]) is not None]
            total = sum(len(run) for _, run in runs)
            kept = sum(len(run) for node, run in runs if node.held[tier][index])
            name = allocator.pools[tier][index].name
            counted = allocator.tree_pages[tier][index]
            _require(counted == total, 6, f"the tree has {total} {name} pages and counts {counted}")
            counted = allocator.ref_counts.kept_pages[tier][index]
            _require(counted == kept, 6, f"{kept} {name} pages are held and {counted} counted")
    _require(tree.node_count == len(nodes), 6, "the tree has a wrong count of its nodes")


def _check_holds(replica: Replica, nodes: list[Node]) -> None:
    owed: Counter[tuple[int, int, int]] = Counter()
    ends = Counter(id(p.awaits) for p in replica.pinning.pins.values() if p.awaits is not None)
    for backlog in replica.prefixes.allocator.backlogs:
        ends.update(id(node) for node in backlog.nodes())
    begins: Counter[int] = Counter()
    for lock_handle in _lock_handles(replica):
        node, tier, component = lock_handle.node, lock_handle.tier, lock_handle.component
        ends[id(node)] += 1
        if not component:
            owed[id(node), tier, 0] += 1
            continue
        for each in node.path():
            if each.start >= lock_handle.start:
                owed[id(each), tier, component] += 1
                begins[id(each)] += each.start == lock_handle.start
    for node in nodes:
        for tier in TIERS:
            if node.held[tier][0]:
                # A node's refcount for full attention must equal the number of its locked or pinned
                # children plus the number of lock handles that end at the node.
                owed[id(node.parent), tier, 0] += 1
    for node in nodes:
        _require(node.ends == ends[id(node)], 5, f"node {node.id} has a wrong count `ends`")
        _require(node.begins == begins[id(node)], 5, f"node {node.id} has a wrong count `begins`")
        for tier in TIERS:
            for component, count in enumerate(node.held[tier]):
                lock_handles = owed.get((id(node), tier, component), 0)
                if count != lock_handles:
                    _violated(
                        5, node, tier, f"is held {count} times, and by {lock_handles} lock handles"
                    )


def _lock_handles(replica: Replica) -> Iterator[LockHandle]:
    for operation in replica.operation_table.in_flight.values():
        yield from operation.lock_handles
    for request in replica.requests:
        yield from request.locks
    for pin in replica.pinning.pins.values():
        yield from pin.lock_handles
        yield from pin.locks


def _check_eviction(
    allocator: PageAllocator, components: Sequence[Component], nodes: list[Node]
) -> None:
    for tier in TIERS:
        for node in allocator.limits.leaving(tier):
            if node.values[tier][0] is None or allocator.evictable(tier, 0, node):
                _violated(6, node, tier, "counts as leaving, and is gone or evictable")
        for index in range(len(components)):
            entries = allocator.queues[tier][index].entries()
            queued = set(map(id, entries))
            _require(len(queued) == len(entries), 6, "a node has two eviction entries")
            for node in nodes:
                if allocator.evictable(tier, index, node) and id(node) not in queued:
                    name = allocator.pools[tier][index].name
                    _require(
                        False, 6, f"{name} pages of node {node.id} are not queued for eviction"
                    )
                if not index and node.occupied_children[tier] and id(node) in queued:
                    _violated(6, node, tier, "is not a leaf and is queued for eviction")


def _owners(
    replica: Replica, nodes: list[Node], tier: int, index: int
) -> Iterator[tuple[Iterable[int], str, object]]:
    yield replica.prefixes.allocator.pools[tier][index].free_pages(), "the free list", ""
    for node in nodes:
        yield node.values[tier][index] or (), "node", node.id
    for operation in replica.operation_table.in_flight.values():
        yield operation.owned_pages(tier, index), "operation", operation.id
    for request in replica.requests:
        own = request.device_pages if tier == DEVICE else request.saved
        yield (own[index] if own else ()), "request", request.id


def _check_ownership(replica: Replica, nodes: list[Node]) -> None:
    for tier in TIERS:
        for index, pool in enumerate(replica.prefixes.allocator.pools[tier]):
            every: list[int] = []
            for pages, _, _ in _owners(replica, nodes, tier, index):
                every.extend(pages)
            # Search for the owners only if some page occurs twice, because the search is slow.
            if len(every) != len(set(every)):
                _name_the_owners(replica, nodes, tier, index)
            missing = pool.capacity - len(every)
            _require(not missing, 7, f"{missing} {pool.name} pages have no owner")


def _name_the_owners(replica: Replica, nodes: list[Node], tier: int, index: int) -> None:
    owners: dict[int, str] = {}
    pool = replica.prefixes.allocator.pools[tier][index].name
    for pages, kind, name in _owners(replica, nodes, tier, index):
        for page in pages:
            owner = f"{kind} {name}".strip()
            what = f"{pool} page {page} belongs to {owners.get(page)} and to {owner}"
            _require(page not in owners, 7, what)
            owners[page] = owner


def _check_operations(replica: Replica, nodes: list[Node]) -> None:
    tree, in_flight = replica.prefixes.tree, replica.operation_table.in_flight
    reachable = set(map(id, nodes)) | set(map(id, tree.roots.values()))
    expected: set[tuple[int, int]] = set()
    for operation in in_flight.values():
        name = f"{operation.kind.name} {operation.id}"
        _require(operation.phase is not Phase.DONE, 8, f"{name} is done and still in flight")
        for node in operation.nodes():
            _require(id(node) in reachable, 8, f"{name} refers to node {node.id}, which is gone")
        if isinstance(operation, Moving):
            expected |= {(id(node), operation.id) for node, _ in operation.segments}
            _check_segments(tree, operation, name)
    marked = {(id(node), mark.id) for node in nodes for mark in node.marks}
    _require(marked == expected, 8, "the marks of nodes and operations differ")
    for queue, line in replica.operation_table.queues().items():
        for _, number in line:
            _require(number in in_flight, 8, f"operation {number} in {queue.name} is not in flight")


def _check_segments(tree: Tree, operation: Moving, name: str) -> None:
    lent = isinstance(operation, LoadBack | Resume) and operation.lent
    pinned = {
        (id(node), lock_handle.component)
        for lock_handle in operation.lock_handles
        if lock_handle.tier == HOST
        for node in lock_handle.node.path()
        if node.start >= lock_handle.start
    }
    for (node, index), pages in operation.segments.items():
        owns = bool(pages) if isinstance(operation, Persist) else operation.fills is not None
        count = tree.components[index].pages_of(node.width) if owns and not lent else 0
        fits = len(pages) == count
        _require(fits, 8, f"{name} has pages of another length for node {node.id}")
        pool, mine = tree.components[index].pool, (id(node), index) in pinned
        _require(mine, 8, f"{name} has not pinned the {pool} pages of node {node.id}")


def _check_bounds(replica: Replica) -> None:
    operation_table, prefetching = replica.operation_table, replica.prefetching
    in_flight = operation_table.in_flight.values()
    budget = sum(each.budget for each in in_flight if isinstance(each, Prefetch))
    _require(prefetching.budget_used == budget, 9, "prefetches in flight use another budget")
    most = replica.config.bounds.prefetches
    _require(len(prefetching.active) <= most, 9, f"more than {most} prefetches are active")
    active = prefetching.active
    has_slot = {
        each.prefetch_slot: PrefetchSlot(each.id, each.phase, each.bound) for each in active
    }
    _require(
        operation_table.prefetch_slots().taken() == has_slot,
        9,
        "the prefetch slots and active prefetches differ",
    )
    rest = (Phase.QUARANTINED, Phase.SERVING)
    working = Counter(each.kind for each in in_flight if each.phase not in rest)
    for_store = sum(each.is_for_store for each in in_flight if each.phase not in rest)
    counted = operation_table.working == working and operation_table.working_for_store == for_store
    _require(counted, 9, "the counts of working operations are wrong")
    issued = sum(isinstance(each, Persist) and each.phase is Phase.ISSUED for each in in_flight)
    _require(replica.persisting.issued == issued, 9, "the count of persists in flight is wrong")
    quarantined = len(operation_table.queues()[Queue.QUARANTINE])
    there = sum(each.phase is Phase.QUARANTINED for each in in_flight)
    _require(quarantined == there, 9, "the count of quarantined operations is wrong")
    for request in replica.requests:
        waits = request.waits_for is not None
        copies = request.stage in _COPYING
        _require(
            waits == copies,
            8,
            f"request {request.id} is {request.stage.name}, and waits for {request.waits_for}",
        )
