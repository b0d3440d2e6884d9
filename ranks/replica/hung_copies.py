"""Copies that were told to stop and never fall quiet: how much of the pools they may keep (R10).

A copy that hangs holds its own pages, and what its receipts lock and pin. It comes back to nobody, and
where it goes on the pools would be gone page by page, with every admission put off for ever.
"""

from .operations import Copy
from .residence import TIERS
from .state import ReplicaState
from .tree import Node


def hung_copies_keep_too_much(state: ReplicaState) -> str | None:
    """Say of which pool the quarantined copies keep more than they may, or return None.

    Looks at all of them: it is asked only when another one has been quarantined.
    """
    hung = [
        each
        for each in state.operations.in_flight.values()
        if isinstance(each, Copy) and each.hangs
    ]
    held = {id(node): node for each in hung for node in _held(each)}.values()
    bound = state.config.bounds.quarantine_pages
    for tier in TIERS:
        for component in state.components:
            pool, index = state.pools[tier][component.index], component.index
            kept = sum(len(each.owned_pages(tier, index)) for each in hung)
            kept += sum(len(node.values[tier][index] or ()) for node in held)
            most = pool.capacity // 2 if bound is None else bound
            if kept > most:
                return (
                    f"{len(hung)} copies that do not end keep {kept} of {pool.capacity} {pool.name}"
                    f" pages, and {most} may be kept (bounds.quarantine_pages)"
                )
    return None


def _held(operation: Copy) -> set[Node]:
    """Return the nodes that a copy locks or pins on some tier."""
    return {
        node
        for receipt in operation.receipts
        for node in receipt.node.path()
        if node.start >= receipt.start
    }
