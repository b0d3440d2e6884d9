"""The invariants of the replicated state, recomputed from scratch.

The numbers are those of `docs/architecture.md`. A violation is a bug of Lockstep's own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from ...coordinator.operation import Kind, Phase, Queue
from .backing_up import BackingUp
from .operations import Copy, Operation, Persist, Prefetch
from .prefetching import Prefetching
from .state import ReplicaState
from .tree import DEVICE, HOST, Node

TIERS = (DEVICE, HOST)
TIER_NAMES = ("device", "host")


class InvariantViolation(AssertionError):
    """An invariant of the replicated state does not hold."""


def check(state: ReplicaState, prefetching: Prefetching, backing_up: BackingUp) -> None:
    """Raise `InvariantViolation` with a sentence for the first invariant that does not hold."""
    nodes = list(state.tree.nodes())
    _check_roots(state)
    for node in nodes:
        _check_node(state, node)
    _check_counts(state, nodes)
    _check_eviction(state, nodes)
    _check_ownership(state, nodes)
    _check_operations(state, nodes)
    _check_bounds(state, prefetching, backing_up)


def _require(holds: bool, number: int, sentence: str) -> None:
    if not holds:
        raise InvariantViolation(f"invariant {number}: {sentence}")


def _check_roots(state: ReplicaState) -> None:
    for place, root in state.tree.roots.items():
        namespace = place.namespace
        _require(root.parent is None, 1, f"the root of {namespace!r} has a parent")
        empty = all(run is None for tier in TIERS for run in root.values[tier])
        _require(empty and not root.width, 1, f"the root of {namespace!r} holds pages")
        used = bool(root.children) or place in state.requests_in
        _require(used, 2, f"the root of {namespace!r} is there for nothing")


def _check_node(state: ReplicaState, node: Node) -> None:
    name, parent = f"node {node.id}", node.parent
    assert parent is not None
    first = node.tokens[: state.tree.page_bytes]
    _require(node.width > 0, 1, f"{name} has an empty key")
    _require(len(node.tokens) == node.width * state.tree.page_bytes, 1, f"{name} is misaligned")
    _require(parent.children.get(first) is node, 1, f"{name} does not hang under its parent")
    _require(node.start == parent.end, 1, f"{name} does not continue its parent")
    device, host = node.values[DEVICE][0], node.values[HOST][0]
    for tier, run in zip(TIERS, (device, host), strict=True):
        _require(run is None or len(run) == node.width, 7, f"{name} has pages of another length")
        on_tier = sum(child.values[tier][0] is not None for child in node.children.values())
        _require(node.occupied_children[tier] == on_tier, 6, f"{name} miscounts its children")
    held = node.holds(DEVICE) or node.holds(HOST)
    _require(device is not None or host is not None or bool(held), 2, f"{name} is dead")
    _require(device is not None or not node.holds(DEVICE), 5, f"{name} is locked off the device")
    if parent.parent is not None:
        for tier, run in zip(TIERS, (device, host), strict=True):
            above = parent.values[tier][0] is not None
            if run is not None and not above:
                _require(False, 4, f"{name} is on the {TIER_NAMES[tier]} and its parent is not")
            for component, count in enumerate(node.held[tier]):
                if count < 0:
                    _require(False, 5, f"{name} has a negative count of holds")
                if parent.held[tier][component] < count:
                    _require(False, 5, f"{name} is held more often than its parent")


def _check_counts(state: ReplicaState, nodes: list[Node]) -> None:
    for tier in TIERS:
        there = [node for node in nodes if node.values[tier][0] is not None]
        total = sum(node.width for node in there)
        kept = sum(node.width for node in there if node.holds(tier))
        name = TIER_NAMES[tier]
        _require(state.tree_pages[tier] == total, 6, f"{name} pages of the tree are miscounted")
        _require(state.holds.kept_pages[tier] == kept, 6, f"kept {name} pages are miscounted")
    _require(state.tree.node_count == len(nodes), 6, "the nodes are miscounted")


def _check_eviction(state: ReplicaState, nodes: list[Node]) -> None:
    for tier in TIERS:
        entries = state.eviction[tier].entries()
        _require(len(set(map(id, entries))) == len(entries), 6, "a node has two eviction entries")
        queued = set(map(id, entries))
        for node in nodes:
            name = f"node {node.id} on the {TIER_NAMES[tier]}"
            _require(node.queued[tier] == (id(node) in queued), 6, f"{name} is misqueued")
            reachable = node.queued[tier] or not state.evictable(node, tier)
            _require(reachable, 6, f"{name} could be evicted and is not queued")


def _owners(
    state: ReplicaState, nodes: list[Node], tier: int
) -> Iterator[tuple[Iterable[int], str, object]]:
    yield state.pools[tier].free_pages(), "the free list", ""
    for node in nodes:
        yield node.values[tier][0] or (), "node", node.id
    for operation in state.operations.in_flight.values():
        yield operation.owned_pages(tier), "operation", operation.id
    if tier == DEVICE:
        for request in state.requests.values():
            yield request.own, "request", request.id


def _check_ownership(state: ReplicaState, nodes: list[Node]) -> None:
    for tier in TIERS:
        every: list[int] = []
        for pages, _, _ in _owners(state, nodes, tier):
            every.extend(pages)
        # Which page has two owners is worth looking for only once it is known that one has.
        if len(every) != len(set(every)):
            _name_the_owners(state, nodes, tier)
        missing = state.pools[tier].capacity - len(every)
        _require(not missing, 7, f"{missing} {TIER_NAMES[tier]} pages belong to nobody")


def _name_the_owners(state: ReplicaState, nodes: list[Node], tier: int) -> None:
    owners: dict[int, str] = {}
    for pages, kind, name in _owners(state, nodes, tier):
        for page in pages:
            owner = f"{kind} {name}".strip()
            what = f"{TIER_NAMES[tier]} page {page} belongs to {owners.get(page)} and to {owner}"
            _require(page not in owners, 7, what)
            owners[page] = owner


def _check_operations(state: ReplicaState, nodes: list[Node]) -> None:
    reachable = set(map(id, nodes)) | set(map(id, state.tree.roots.values()))
    marks: Counter[tuple[int, int]] = Counter()
    for operation in state.operations.in_flight.values():
        name = f"{operation.kind.name} {operation.id}"
        _require(operation.phase is not Phase.DONE, 8, f"{name} is done and still there")
        for node in _nodes_of(operation):
            _require(id(node) in reachable, 8, f"{name} refers to node {node.id}, which is gone")
        if isinstance(operation, Copy | Persist):
            for segment in operation.segments:
                marks[id(segment.node), operation.id] += 1
                lent = state.engine_owns_device and operation.kind is Kind.LOAD_BACK
                fits = len(segment.pages) == (0 if lent else segment.node.width)
                _require(fits, 8, f"{name} has pages of another length for node {segment.node.id}")
                held = segment.node.holds(HOST)
                _require(held > 0, 8, f"{name} refers to node {segment.node.id}, which has no pin")
    marked = {(id(node), number) for node in nodes for number in node.marks}
    _require(marked == set(marks), 8, "the nodes' marks are not those of the operations")
    _require(all(count == 1 for count in marks.values()), 8, "an operation has a node twice")
    for queue, line in state.operations.queues.items():
        for _, number in line:
            there = number in state.operations.in_flight
            _require(there, 8, f"operation {number} stands in {queue.name} and is gone")


def _nodes_of(operation: Operation) -> Iterator[Node]:
    for receipt in operation.receipts:
        yield receipt.node
    if isinstance(operation, Copy | Persist):
        for segment in operation.segments:
            yield segment.node


def _check_bounds(state: ReplicaState, prefetching: Prefetching, backing_up: BackingUp) -> None:
    in_flight = state.operations.in_flight.values()
    budget = sum(each.budget for each in in_flight if isinstance(each, Prefetch))
    _require(prefetching.budget_used == budget, 9, "the prefetch budget is not what is in flight")
    _require(
        len(prefetching.active) <= state.config.bounds.prefetches,
        9,
        "too many prefetches at a time",
    )
    issued = sum(isinstance(each, Persist) and each.phase is Phase.ISSUED for each in in_flight)
    _require(backing_up.issued == issued, 9, "the persists in flight are miscounted")
    quarantined = len(state.operations.queues[Queue.QUARANTINE])
    there = sum(each.phase is Phase.QUARANTINED for each in in_flight)
    _require(quarantined == there, 9, "the quarantined operations are miscounted")
