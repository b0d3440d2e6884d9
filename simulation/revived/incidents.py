"""Revived bugs from the project's founding incidents; each reimplements the old, faulty behaviour."""

from collections.abc import Sequence
from functools import partial

from ...coordinator.operation import Phase
from ...coordinator.verdict import PrefetchArrived
from ...ranks.protocol.orders import CopyToDevice, CopyToHost, CopyTransfer, Order
from ...ranks.replica.core.pages import PageRun
from ...ranks.replica.device.lent_device import LentDevice
from ...ranks.replica.device.owned import OwnedDevice
from ...ranks.replica.operations.lent import Lent
from ...ranks.replica.operations.loading_back import LoadingBack
from ...ranks.replica.operations.requests import LentRequest, OwnedRequest
from ...ranks.replica.parts import Parts
from ...ranks.replica.prefetch.prefetching import Prefetching
from ...ranks.replica.tree.components import Component
from ...ranks.replica.tree.matching import reach
from ...ranks.replica.tree.node import DEVICE, HOST, Node
from ...ranks.replica.tree.page_allocator import TIERS, LeavingPages, PageAllocator
from ..rank.conditions import Conditions, OrderWork
from ..rank.copies import Copies
from ..rank.epoch import Build, make_executor
from ..rank.executor import SimulatedExecutor
from ..rank.memory import SymbolicMemory


def backups_of_unfilled_pages() -> Build:
    """Return a build whose backups also copy engine-owned pages that a load has left unfilled."""
    return Build(parts=Parts(lent=_TakesAllForFilled))


class _TakesAllForFilled(LentDevice):
    def _lent(self, request: LentRequest, tokens: bytes, end: int, runs: Sequence[PageRun]) -> Lent:
        request.unfilled = ()
        return super()._lent(request, tokens, end, runs)


def shared_descriptor() -> Build:
    """Return a build with incident A: a load back changes a tree node's page numbers, not a copy.

    As in the original code, this happens in all pools except that of full attention.
    """
    make = partial(make_executor, kind=_MovesDescriptors)
    return Build(make=make, parts=Parts(loading_back=_SharesDescriptors))


class _SharedTransfer(CopyTransfer, frozen=True, kw_only=True):
    """A transfer that has a reference to the page numbers of a tree node, instead of a copy."""

    shared: PageRun

    def move_to_device(self, host_pages: int) -> None:
        """Change the tree node's page numbers in place, as the original load to the device did."""
        for at, page in enumerate(self.shared):
            self.shared[at] = host_pages - 1 - page


class _SharesDescriptors(LoadingBack):
    def _transfer(self, node: Node, component: Component, destinations: PageRun) -> CopyTransfer:
        made = super()._transfer(node, component, destinations)
        shared = node.values[HOST][component.index]
        if not component.index or shared is None:
            return made
        return _SharedTransfer(made.pool, made.sources, made.destinations, shared=shared)


class _MovesDescriptors(SimulatedExecutor):
    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            for transfer in order.transfers if isinstance(order, CopyToDevice) else ():
                if isinstance(transfer, _SharedTransfer):
                    transfer.move_to_device(len(self.memory.host[transfer.pool].content))


def load_back_from_the_last_host_node() -> Build:
    """Return a build with incident B: admission loads from `last_host_node`, not `best_match_node`."""
    return Build(parts=Parts(owned=_ReachesTheLastHostNode))


class _ReachesTheLastHostNode(OwnedDevice):
    def _reach(self, nodes: list[Node]) -> tuple[int, int]:
        device, best, last_host = reach(self._prefixes.needs, nodes)
        return device, max(best, last_host)


def complete_without_the_other_pools() -> Build:
    """Return a build with incident C: a prefetch is complete once its full-attention pages have landed.

    Transfers of the other pools may still be running then.
    """
    return Build(parts=Parts(prefetching=_WaitsForTheKvAlone))


class _WaitsForTheKvAlone(Prefetching):
    def arrived(self, verdict: PrefetchArrived) -> None:
        operation = self.has_slot(verdict.operation)
        if operation is not None and operation.phase is Phase.TRANSFER:
            kv = sum(len(each.keys) for each in operation.wanted if not each.component)
            if kv and verdict.pages >= kv:
                verdict = verdict._replace(pages=operation.wanted_count)
        super().arrived(verdict)


def cascade_past_pins() -> Build:
    """Return a build with incident D: a cascade of evictions checks device locks only, and no pins."""
    return Build(parts=Parts(allocator=_LooksAtLocksOnly))


class _LooksAtLocksOnly(PageAllocator):
    def cascade(self, node: Node, leaving: LeavingPages) -> None:
        while node.parent is not None and not (node.children or node.is_held_on(DEVICE)):
            if self._tree.is_whole(node):
                return
            parent = node.parent
            for tier in TIERS:
                for index in reversed(range(len(self.components))):
                    if node.values[tier][index] is not None:
                        self.detach(node, tier, index, leaving)
            self._tree.remove(node)
            if parent.parent is None and not parent.children:
                self._emptied(parent)
            node = parent


def retract_the_kv_alone() -> Build:
    """Return a build with incident E: retraction saves only the pages of the KV pool.

    In the other pools the resumed request continues with slots that other requests have used meanwhile.
    """
    return Build(parts=Parts(owned=_SavesTheKvAlone))


class _SavesTheKvAlone(OwnedDevice):
    def _tail(self, request: OwnedRequest, computed_bytes: int) -> list[PageRun]:
        kv, *others = super()._tail(request, computed_bytes)
        return [kv, *(run[:0] for run in others)]


def retract_hands_out_views() -> Build:
    """Return a build with incident E, part 2: retraction saves references to device slots, no copies.

    The resumed request then reads whatever its old device slots contain by that time.
    """
    return Build(make=partial(make_executor, copies=_HandsOutViews))


class _HandsOutViews(Copies):
    def __init__(self, conditions: Conditions, memory: SymbolicMemory, page_bytes: int) -> None:
        super().__init__(conditions, memory, page_bytes)
        self._views: dict[tuple[str, int], int] = {}
        """By (pool, host page): the device slot whose content is read in place of the host page's own.
        """

    def _is_whole(self, page: tuple[str, int]) -> bool:
        # Accept any page, because the original code did not verify restored pages.
        del page
        return True

    def begin(self, order: CopyToHost | CopyToDevice, work: OrderWork) -> None:
        sealed = [transfer for transfer in order.transfers if transfer.sealed]
        for pool, sources in [(each.pool, each.sources) for each in sealed]:
            host, device = self._memory.host[pool], self._memory.device[pool]
            for page in sources if isinstance(order, CopyToDevice) else ():
                host.content[page] = device.content[self._views[pool, page]]
        super().begin(order, work)
        for each in sealed if isinstance(order, CopyToHost) else ():
            for page, slot in zip(each.destinations, each.sources, strict=True):
                self._views[each.pool, page] = slot
