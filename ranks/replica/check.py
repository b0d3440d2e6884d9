"""The invariants of the replicated state, recomputed from scratch.

The numbers are those of `docs/architecture.md`. A violation is a bug of Lockstep's own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NoReturn

from ...coordinator.operation import Kind, Phase, Queue
from ...coordinator.seats import Seat
from .backing_up import BackingUp
from .holds import Receipt
from .operations import Copy, Operation, Persist, Prefetch
from .pinning import Pinning
from .prefetching import Prefetching
from .residence import TIER_NAMES, TIERS
from .state import ReplicaState
from .tree import DEVICE, HOST, Node


class InvariantViolation(AssertionError):
    """An invariant of the replicated state does not hold."""


def check(
    state: ReplicaState, prefetching: Prefetching, backing_up: BackingUp, pinning: Pinning
) -> None:
    """Raise `InvariantViolation` with a sentence for the first invariant that does not hold."""
    nodes = list(state.tree.nodes())
    _check_roots(state)
    pinned = {id(node) for pin in pinning.pins.values() for node in pin.node.path()}
    for node in nodes:
        _check_node(state, node)
        if id(node) not in pinned:
            _check_locked(state, node)
    _check_counts(state, nodes)
    _check_holds(state, nodes, pinning)
    _check_eviction(state, nodes)
    _check_ownership(state, nodes)
    _check_operations(state, nodes)
    _check_bounds(state, prefetching, backing_up)


def _require(holds: bool, number: int, sentence: str) -> None:
    if not holds:
        raise InvariantViolation(f"invariant {number}: {sentence}")


def _check_roots(state: ReplicaState) -> None:
    for root in state.tree.roots.values():
        place = root.place
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
    hangs = node.first == first and parent.children.get(first) is node
    _require(hangs, 1, f"{name} does not hang under its parent")
    _require(node.start == parent.end, 1, f"{name} does not continue its parent")
    for tier in TIERS:
        _check_values(state, node, tier)
        if parent.parent is None:
            continue
        if node.values[tier][0] is not None and parent.values[tier][0] is None:
            _violated(4, node, tier, "has pages and its parent has none")
        if parent.held[tier][0] < node.held[tier][0]:
            _violated(5, node, tier, "is held more often than its parent")
    held = sum(map(sum, node.held))
    _require(node.hold_count == held, 5, f"{name} miscounts what holds it")
    _require(node.has(0) or bool(held), 2, f"{name} is dead")


def _check_values(state: ReplicaState, node: Node, tier: int) -> None:
    values, held = node.values[tier], node.held[tier]
    base, width = values[0], node.width
    there = node.there >> (tier * len(values))
    # Sentences are made only for what is wrong: this runs for every node after every step.
    for component, run, count in zip(state.components, values, held, strict=True):
        index = component.index
        if run is None:
            if there >> index & 1:
                _violated(6, node, tier, f"misremembers its {component.pool} pages")
        else:
            if not there >> index & 1:
                _violated(6, node, tier, f"misremembers its {component.pool} pages")
            if len(run) != component.pages_of(width):
                _violated(7, node, tier, f"has {component.pool} pages of another length")
            if base is None:
                _violated(3, node, tier, f"has {component.pool} pages without full attention")
        if count < 0:
            _violated(5, node, tier, "has a negative count of holds")
        if count > held[0]:
            _violated(5, node, tier, f"is held for {component.pool} and not for full attention")
    on_tier = 0
    for child in node.children.values():
        on_tier += child.values[tier][0] is not None
    if node.occupied_children[tier] != on_tier:
        _violated(6, node, tier, "miscounts its children")


def _check_locked(state: ReplicaState, node: Node) -> None:
    """Only a pin locks what is not on the device, in case that it comes there."""
    if node.held[DEVICE][0] and node.values[DEVICE][0] is None and not state.fills(node, DEVICE, 0):
        _violated(5, node, DEVICE, "is locked there without pages, and nothing fills it")


def _violated(number: int, node: Node, tier: int, what: str) -> NoReturn:
    raise InvariantViolation(
        f"invariant {number}: node {node.id} {what}, on the {TIER_NAMES[tier]}"
    )


def _check_counts(state: ReplicaState, nodes: list[Node]) -> None:
    residence = state.residence
    for tier in TIERS:
        for index in range(len(state.components)):
            runs = [(node, run) for node in nodes if (run := node.values[tier][index]) is not None]
            total = sum(len(run) for _, run in runs)
            kept = sum(len(run) for node, run in runs if node.held[tier][index])
            name = residence.pools[tier][index].name
            counted = residence.tree_pages[tier][index]
            _require(counted == total, 6, f"{name} pages of the tree are miscounted")
            counted = residence.holds.kept_pages[tier][index]
            _require(counted == kept, 6, f"kept {name} pages are miscounted")
    _require(state.tree.node_count == len(nodes), 6, "the nodes are miscounted")


def _check_holds(state: ReplicaState, nodes: list[Node], pinning: Pinning) -> None:
    """Every lock and pin has a receipt, and every receipt has its locks and pins."""
    owed: Counter[tuple[int, int, int]] = Counter()
    for receipt in _receipts(state, pinning):
        for node in receipt.node.path():
            if node.start >= receipt.start:
                owed[id(node), receipt.tier, receipt.component] += 1
    for node in nodes:
        for tier in TIERS:
            for component, count in enumerate(node.held[tier]):
                receipts = owed.get((id(node), tier, component), 0)
                if count != receipts:
                    _violated(
                        5, node, tier, f"is held {count} times, and {receipts} receipts say so"
                    )


def _receipts(state: ReplicaState, pinning: Pinning) -> Iterator[Receipt]:
    for operation in state.operations.in_flight.values():
        yield from operation.receipts
    for request in state.requests.values():
        yield from request.locks
    for pin in pinning.pins.values():
        yield from pin.receipts
        yield from pin.locks


def _check_eviction(state: ReplicaState, nodes: list[Node]) -> None:
    residence = state.residence
    for tier in TIERS:
        for node in residence.limits.leaving(tier):
            if node.values[tier][0] is None or residence.evictable(tier, 0, node):
                _violated(6, node, tier, "counts as leaving, and nothing keeps it from that")
        for index in range(len(state.components)):
            entries = residence.queues[tier][index].entries()
            queued = set(map(id, entries))
            _require(len(queued) == len(entries), 6, "a node has two eviction entries")
            for node in nodes:
                if residence.evictable(tier, index, node) and id(node) not in queued:
                    name = residence.pools[tier][index].name
                    _require(False, 6, f"{name} pages of node {node.id} could leave and cannot")
                if not index and node.occupied_children[tier] and id(node) in queued:
                    _violated(6, node, tier, "is no leaf and waits to be evicted")


def _owners(
    state: ReplicaState, nodes: list[Node], tier: int, index: int
) -> Iterator[tuple[Iterable[int], str, object]]:
    yield state.residence.pools[tier][index].free_pages(), "the free list", ""
    for node in nodes:
        yield node.values[tier][index] or (), "node", node.id
    for operation in state.operations.in_flight.values():
        yield operation.owned_pages(tier, index), "operation", operation.id
    for request in state.requests.values():
        own = request.own if tier == DEVICE else request.saved
        yield (() if own is None else own[index]), "request", request.id


def _check_ownership(state: ReplicaState, nodes: list[Node]) -> None:
    for tier in TIERS:
        for index in range(len(state.components)):
            every: list[int] = []
            for pages, _, _ in _owners(state, nodes, tier, index):
                every.extend(pages)
            # Which page has two owners is worth looking for only once it is known that one has.
            if len(every) != len(set(every)):
                _name_the_owners(state, nodes, tier, index)
            pool = state.residence.pools[tier][index]
            missing = pool.capacity - len(every)
            _require(not missing, 7, f"{missing} {pool.name} pages belong to nobody")


def _name_the_owners(state: ReplicaState, nodes: list[Node], tier: int, index: int) -> None:
    owners: dict[int, str] = {}
    pool = state.residence.pools[tier][index].name
    for pages, kind, name in _owners(state, nodes, tier, index):
        for page in pages:
            owner = f"{kind} {name}".strip()
            what = f"{pool} page {page} belongs to {owners.get(page)} and to {owner}"
            _require(page not in owners, 7, what)
            owners[page] = owner


def _check_operations(state: ReplicaState, nodes: list[Node]) -> None:
    reachable = set(map(id, nodes)) | set(map(id, state.tree.roots.values()))
    seen: Counter[tuple[int, int, int]] = Counter()
    for operation in state.operations.in_flight.values():
        name = f"{operation.kind.name} {operation.id}"
        _require(operation.phase is not Phase.DONE, 8, f"{name} is done and still there")
        for node in _nodes_of(operation):
            _require(id(node) in reachable, 8, f"{name} refers to node {node.id}, which is gone")
        if isinstance(operation, Copy | Persist):
            for segment in operation.segments:
                node, component = segment.node, state.components[segment.component]
                seen[id(node), operation.id, segment.component] += 1
                lent = state.engine_owns_device and operation.kind is Kind.LOAD_BACK
                pages = 0 if lent else component.pages_of(node.width)
                fits = len(segment.pages) == pages
                _require(fits, 8, f"{name} has pages of another length for node {node.id}")
                indexed = (node, segment.component) in operation.touched
                _require(indexed, 8, f"{name} cannot find its pages for node {node.id}")
                pinned = node.held[HOST][segment.component] > 0
                _require(pinned, 8, f"{name} refers to node {node.id}, which has no pin")
        indexed = len(operation.touched) == len(operation.segments)
        _require(indexed, 8, f"{name} finds pages that are not its own")
    marked = {(id(node), number) for node in nodes for number in node.marks}
    expected = {(node, number) for node, number, _ in seen}
    _require(marked == expected, 8, "the nodes' marks are not those of the operations")
    _require(all(count == 1 for count in seen.values()), 8, "an operation has a node twice")
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
    active = prefetching.active.values()
    seated = {each.seat: Seat(each.id, each.phase, each.bound) for each in active}
    _require(state.seats.freeze().taken() == seated, 9, "the seats are not the active prefetches'")
    working = Counter(each.kind for each in in_flight if each.phase is not Phase.QUARANTINED)
    _require(state.operations.working == working, 9, "the operations that work are miscounted")
    issued = sum(isinstance(each, Persist) and each.phase is Phase.ISSUED for each in in_flight)
    _require(backing_up.issued == issued, 9, "the persists in flight are miscounted")
    quarantined = len(state.operations.queues[Queue.QUARANTINE])
    there = sum(each.phase is Phase.QUARANTINED for each in in_flight)
    _require(quarantined == there, 9, "the quarantined operations are miscounted")
