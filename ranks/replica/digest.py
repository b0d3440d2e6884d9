"""A digest of the whole replicated state, computed from nothing but the state.

The rolling digest of the journal is what rounds compare, since it costs nothing; this one is the
slow witness that it stands for the state. Simulation and tests compare both over the ranks.
"""

import xxhash

from .operations import Prefetch
from .residence import TIERS
from .state import ReplicaState
from .tree import Node


def state_digest(state: ReplicaState) -> int:
    """Return 63 bits that differ where tree, page tables, operations, requests or clocks differ."""
    digest = xxhash.xxh3_64()

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    add(state.clock, state.time_ms, state.generation, state.weights_version, state.lost)
    add(state.store_attached, state.store_draining, state.store_number)
    add(state.proposal, state.proposed_ms)
    for tier in TIERS:
        for pool in state.residence.pools[tier]:
            add(pool.name, pool.free_pages().tobytes())
    for node in state.tree.nodes():
        add(*_node(node))
    for operation in state.operations.in_flight.values():
        add(operation.id, operation.kind, operation.phase, operation.ending)
        for tier in TIERS:
            for component in state.components:
                add(operation.owned_pages(tier, component.index).tobytes())
        if isinstance(operation, Prefetch):
            add(operation.bound, operation.votes, operation.landed, operation.keys)
            add(operation.seat)
    for queue, line in state.operations.queues.items():
        add(queue, tuple(line))
    for request in state.requests.values():
        add(request.id, request.prefix, *(run.tobytes() for run in request.own), request.admitted)
        add(request.retract, [run.tobytes() for run in request.saved or ()], request.computed)
        add(sorted(request.checkpoints), request.priority)
        add(request.load, request.prefetch, request.fetched, request.load_failed)
        add(request.place, sorted(request.copies))
    add(tuple(state.misses.items()))
    return digest.intdigest() >> 1


def _node(node: Node) -> tuple[object, ...]:
    assert node.parent is not None
    values = [None if run is None else run.tobytes() for tier in TIERS for run in node.values[tier]]
    return (
        node.id,
        node.parent.id,
        node.start,
        node.tokens,
        values,
        node.held,
        node.last_access,
        node.hits,
        node.priority,
        node.saved_at,
        node.store,
        sorted(node.persisted),
        sorted(node.marks),
    )
