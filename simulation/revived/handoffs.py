"""Revived bugs in the handoff between groups; each reimplements the old, faulty behaviour."""

from collections.abc import Sequence

from msgspec import structs

from ...ranks.protocol.orders import Need
from ...ranks.replica.core.replica_parts import ReplicaParts
from ...ranks.replica.operations.kinds import Serving
from ...ranks.replica.operations.operation_table import OperationTable
from ...ranks.replica.operations.requests import Requests
from ...ranks.replica.operations.serving_peers import ServingPeers
from ...ranks.replica.operations.store import Store
from ...ranks.replica.parts import Parts
from ...ranks.replica.prefetch.lookups import LookupPlanner
from ...ranks.replica.prefetch.prefetching import Prefetching
from ...ranks.replica.tree.components import Component
from ...ranks.replica.tree.node import HOST, Node
from ...ranks.replica.tree.prefixes import Prefixes
from ..rank.epoch import Build


def first_pages_of_a_window() -> Build:
    """Return a build whose prefetch reads the first of the window pages that it looked up.

    A prefetch looks up more pages than a window needs. A handed-over request needs the last ones,
    because its window ends where its prefix ends.
    """
    return Build(parts=Parts(prefetching=_ReadsFirstPages))


class _ReadsFirstPages(Prefetching):
    def __init__(
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        store: Store,
        requests: Requests,
    ) -> None:
        super().__init__(basis, prefixes, operation_table, store, requests)
        self._lookups = _NamesFirstPages(basis, prefixes, store)


class _FirstPages(Need, frozen=True):
    def keys_at(self, positions: Sequence[int]) -> tuple[bytes, ...]:
        return self.keys[: len(positions)]


class _NamesFirstPages(LookupPlanner):
    def _need(
        self,
        component: Component,
        path: list[Node],
        keys: list[bytes],
        floor: int,
        *,
        heeds: bool,
    ) -> Need:
        need = super()._need(component, path, keys, floor, heeds=heeds)
        if not component.per_page:
            return need
        return _FirstPages(*structs.astuple(need))


def one_pin_for_all_ends() -> Build:
    """Return a build that pins pages only for the longest of the lengths at which a request is served.

    The pages that only a shorter length needs, such as those of its window, may be evicted.
    """
    return Build(parts=Parts(serving=_PinsTheFarthestEnd))


class _PinsTheFarthestEnd(ServingPeers):
    def _pin(self, operation: Serving, component: Component, nodes: Sequence[Node]) -> None:
        allocator, before = self._prefixes.allocator, operation.lock_handles
        last = max((*nodes, *(each.node for each in before)), key=lambda node: node.end)
        operation.lock_handles = allocator.hold(HOST, last, requested=True)
        allocator.release(before)
        if not component.index:
            operation.last = last
