"""Quarantine: pages kept by stopped operations whose I/O never ended, and bounds on them (R10).

Such an operation keeps its pages, locks and pins until its I/O ends, which may be never. Without a
bound the pools would drain and every admission would wait forever. Over the bound the store is
detached, or the epoch ends if the I/O is not the store's.
"""

from collections.abc import Iterable

from ....coordinator.operation import Phase
from ...protocol.replica_config import ReplicaConfig
from ..core.pages import PagePool
from ..tree.node import HOST
from ..tree.page_allocator import TIERS
from ..tree.prefixes import Prefixes
from .kinds import Copy, Operation
from .operation_table import OperationTable
from .store import Store

KEEPS_TOO_MUCH = "its calls that do not return keep too many host pages"
"""The reason reported when the group detaches a store because of its quarantined pages."""

Kept = tuple[list[int], list[int]]
"""Numbers of pages that quarantined operations keep, by tier and component."""


class Quarantine:
    """Counts quarantined pages, and compares them with their bounds."""

    def __init__(
        self,
        config: ReplicaConfig,
        prefixes: Prefixes,
        operation_table: OperationTable,
        store: Store,
    ) -> None:
        self._config = config
        self._pools = prefixes.allocator.pools
        self._operation_table = operation_table
        self._store = store

    def store_keeps_too_much(self) -> bool:
        """Return whether quarantined operations of the attached store keep too many pages of a pool.

        If no store is attached, the operations of the last store are checked.
        """
        kept = self._kept(each for each in self._of_stores() if self._store.concerns(each))
        return any(
            pages > self._most(pool, 4)
            for pages, pool in zip(kept[HOST], self._pools[HOST], strict=True)
        )

    def stores_keep_most(self) -> str | None:
        """Describe a host pool of which quarantined store I/O keeps more than half, or return None."""
        kept = self._kept(self._of_stores())
        for pages, pool in zip(kept[HOST], self._pools[HOST], strict=True):
            if 2 * pages > pool.capacity:
                return f"{pages} of {pool.capacity} {pool.name} pages"
        return None

    def exceeds_budget(self) -> str | None:
        """Return an error text if quarantined I/O outside the store keeps too many pages, else None.

        Such I/O (copies, reads between groups) cannot be ended by detaching a store.
        """
        hung = [each for each in self._apart() if not each.is_for_store]
        kept = self._kept(hung)
        for tier in TIERS:
            for pages, pool in zip(kept[tier], self._pools[tier], strict=True):
                most = self._most(pool, 2)
                if pages > most:
                    return _too_much(len(hung), pages, pool.capacity, pool.name, most)
        # A request lends the same pages to several copies, so count the pages of each lender once.
        lenders: dict[str, int] = {}
        for each in (each for each in hung if isinstance(each, Copy)):
            lenders[each.lender] = max(each.lent, lenders.get(each.lender, 0))
        lent = sum(lenders.values())
        engine_pages = self._config.engine_pages
        if engine_pages and 2 * lent > engine_pages:
            return _too_much(len(hung), lent, engine_pages, "lent device", engine_pages // 2)
        return None

    def _most(self, pool: PagePool, share: int) -> int:
        """Return the maximum number of quarantined pages of a pool: the pool's size divided by `share`.

        The setting `quarantine_pages`, limited to half of the pool, takes precedence.
        """
        bound = self._config.bounds.quarantine_pages
        return pool.capacity // share if bound is None else min(bound, pool.capacity // 2)

    def _apart(self) -> Iterable[Operation]:
        in_flight = self._operation_table.in_flight.values()
        return (each for each in in_flight if each.phase is Phase.QUARANTINED)

    def _of_stores(self) -> Iterable[Operation]:
        return (each for each in self._apart() if each.is_for_store)

    def _kept(self, operations: Iterable[Operation]) -> Kept:
        count = len(self._pools[HOST])
        kept: Kept = ([0] * count, [0] * count)
        seen: set[tuple[int, int, int]] = set()
        for operation in operations:
            for tier in TIERS:
                for component in range(count):
                    kept[tier][component] += len(operation.owned_pages(tier, component))
            for lock_handle in operation.lock_handles:
                tier, component = lock_handle.tier, lock_handle.component
                for node in lock_handle.node.path():
                    held = (tier, component, node.id)
                    if node.start < lock_handle.start:
                        break
                    if held not in seen:
                        seen.add(held)
                        kept[tier][component] += len(node.values[tier][component] or ())
        return kept


def _too_much(count: int, pages: int, capacity: int, pool: str, most: int) -> str:
    return (
        f"{count} hung operations keep {pages} of {capacity} {pool} pages, and {most} may be"
        " kept (bounds.quarantine_pages)"
    )
