"""A digest of the whole replicated state, computed from the state alone.

Computing this digest is slow, so rounds compare the journal's rolling digest instead. Simulation and
tests compare both, to verify that the journal covers the state.
"""

import xxhash

from .operations.kinds import Prefetch
from .operations.requests import LentRequest, OwnedRequest
from .replica import Replica
from .tree.node import Node
from .tree.page_allocator import TIERS


def state_digest(replica: Replica) -> int:
    """Return a 63-bit digest of the tree, page tables, operations, requests and clocks."""
    digest = xxhash.xxh3_64()

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    prefixes, requests, store = replica.prefixes, replica.requests, replica.store
    attaching = replica.attaching
    add(replica.clock, requests.generation, requests.weights_version)
    add(
        store.attached,
        store.draining,
        store.lost,
        store.lacks_older,
        store.number,
        store.time,
        store.misses.items(),
        store.absences.items(),
        store.lately.items(),
    )
    add(attaching.proposal, attaching.proposed_ms)
    add(replica.messages.agreed, replica.messages.committed)
    for tier in TIERS:
        for pool in prefixes.allocator.pools[tier]:
            add(pool.name, pool.free_pages().tobytes())
    for backlog in prefixes.allocator.backlogs:
        add([node.id for node in backlog.nodes()], sorted(backlog.pages.items()))
        add(sorted(backlog.lost.items()), list(backlog.awaited.items()))
    for node in prefixes.tree.nodes():
        add(*_node(node))
    for operation in replica.operation_table.in_flight.values():
        add(operation.id, operation.kind, operation.phase, operation.ending)
        for tier in TIERS:
            for component in prefixes.components:
                add(operation.owned_pages(tier, component.index).tobytes())
        if isinstance(operation, Prefetch):
            add(operation.bound, operation.votes, operation.landed, operation.keys)
            add(operation.prefetch_slot, operation.source)
    for queue, line in replica.operation_table.queues().items():
        add(queue, line)
    for request in requests:
        add(request.id, request.stage, request.place, request.waits_for, request.prefetch)
        add(request.prefix, request.fetched, *(run.tobytes() for run in request.device_pages))
        add([run.tobytes() for run in request.saved or ()], request.computed, request.source)
        if isinstance(request, OwnedRequest):
            add(sorted(request.ends), sorted(request.checkpoints), request.priority)
        elif isinstance(request, LentRequest):
            add(request.saved_from, sorted(request.copies))
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
        node.is_match_end,
        node.store,
        sorted(node.persisted),
        node.stored_at,
        sorted(mark.id for mark in node.marks),
    )
