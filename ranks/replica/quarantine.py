"""What operations keep that were told to stop and never fell quiet, and how much that may be (R10).

They keep their own pages, and what their receipts lock and pin. It comes back to nobody before they
fall quiet, which may be never; and if it went on so, the pools would be gone page by page, with every
admission put off for ever. Over a bound the store is detached, or, where copies are what hangs, the
epoch ends. All of it is looked at anew, since it is asked only when something was quarantined.
"""

from collections.abc import Iterable

from ...coordinator.operation import Phase
from .operations import Copy, Operation
from .pages import PagePool
from .residence import TIERS
from .state import ReplicaState
from .tree import HOST

Kept = tuple[list[int], list[int]]
"""By tier and component: how many pages."""


def stores_keep_too_much(state: ReplicaState) -> bool:
    """Say whether the present store, or the last one, keeps more of a pool than it may."""
    kept = _kept(state, (each for each in _of_stores(state) if state.is_of_store(each)))
    return any(
        pages > _most(state, pool, 4)
        for pages, pool in zip(kept[HOST], state.pools[HOST], strict=True)
    )


def stores_keep_most(state: ReplicaState) -> str | None:
    """Say of which pool all stores together keep more than half, or return None."""
    kept = _kept(state, _of_stores(state))
    for pages, pool in zip(kept[HOST], state.pools[HOST], strict=True):
        if 2 * pages > pool.capacity:
            return f"{pages} of {pool.capacity} {pool.name} pages"
    return None


def copies_keep_too_much(state: ReplicaState) -> str | None:
    """Say of which pool the copies that hang keep more than they may, or return None."""
    hung = [each for each in _quarantined(state) if isinstance(each, Copy)]
    kept = _kept(state, hung)
    for tier in TIERS:
        for pages, pool in zip(kept[tier], state.pools[tier], strict=True):
            most = _most(state, pool, 2)
            if pages > most:
                return _too_much(len(hung), pages, pool.capacity, pool.name, most)
    lent, engine_pages = sum(each.lent for each in hung), state.config.engine_pages
    if engine_pages and 2 * lent > engine_pages:
        return _too_much(len(hung), lent, engine_pages, "lent device", engine_pages // 2)
    return None


def _too_much(copies: int, pages: int, capacity: int, pool: str, most: int) -> str:
    return (
        f"{copies} copies that do not end keep {pages} of {capacity} {pool} pages, and {most} may be"
        " kept (bounds.quarantine_pages)"
    )


def _most(state: ReplicaState, pool: PagePool, share: int) -> int:
    """Return how much of a pool may be kept: one part of so many, unless the bound says less."""
    bound = state.config.bounds.quarantine_pages
    return pool.capacity // share if bound is None else min(bound, pool.capacity // 2)


def _quarantined(state: ReplicaState) -> Iterable[Operation]:
    in_flight = state.operations.in_flight.values()
    return (each for each in in_flight if each.phase is Phase.QUARANTINED)


def _of_stores(state: ReplicaState) -> Iterable[Operation]:
    return (each for each in _quarantined(state) if not isinstance(each, Copy))


def _kept(state: ReplicaState, operations: Iterable[Operation]) -> Kept:
    count = len(state.components)
    kept: Kept = ([0] * count, [0] * count)
    seen: set[tuple[int, int, int]] = set()
    for operation in operations:
        for tier in TIERS:
            for component in range(count):
                kept[tier][component] += len(operation.owned_pages(tier, component))
        for receipt in operation.receipts:
            tier, component = receipt.tier, receipt.component
            for node in receipt.node.path():
                held = (tier, component, node.id)
                if node.start < receipt.start:
                    break
                if held not in seen:
                    seen.add(held)
                    kept[tier][component] += len(node.values[tier][component] or ())
    return kept
