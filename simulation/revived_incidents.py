"""The incidents that the project starts from, each as what the old code did; see `revived`."""

# The old code lay inside of what is private here.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from ..coordinator.operation import Phase
from ..coordinator.verdict import Arrived
from ..ranks.orders import CopyToDevice, CopyToHost, CopyTransfer, Order
from ..ranks.replica import serving
from ..ranks.replica.components.needs import Needs
from ..ranks.replica.loading_back import LoadingBack
from ..ranks.replica.matching import Missing, reach
from ..ranks.replica.pages import PageRun, page_run
from ..ranks.replica.prefetching import Prefetching
from ..ranks.replica.request import Request
from ..ranks.replica.residence import TIERS, Freed, Residence
from ..ranks.replica.retracting import Retracting
from ..ranks.replica.tree import DEVICE, HOST, Node
from .conditions import Work
from .copies import Copies
from .executor import SimulatedExecutor
from .memory import Slots
from .replacing import replaced


@dataclass(frozen=True, slots=True)
class _SharedTransfer(CopyTransfer):
    """A transfer that has a node's own array of page numbers in it."""

    shared: PageRun = field(default_factory=page_run)

    def move_to_device(self, host_pages: int) -> None:
        """Let the numbers be those of the device, which counts the pinned pages from the other end."""
        for at, page in enumerate(self.shared):
            self.shared[at] = host_pages - 1 - page


@contextmanager
def shared_descriptor() -> Generator[None]:
    """Incident A: a load back has the node's own page numbers, and the executor changes them.

    Of the pools beside full attention's, whose transfers were the new ones.
    """
    begin, carry_out = LoadingBack.begin, SimulatedExecutor.carry_out

    def begin_sharing(  # noqa: PLR0917 - the arguments are those of the method.
        self: LoadingBack,
        request: Request,
        last: Node,
        missing: Sequence[Missing],
        pages: Sequence[PageRun],
        more: Sequence[CopyTransfer] = (),
    ) -> int:
        number = begin(self, request, last, missing, pages, more)
        order = self._state.orders[-1]
        assert isinstance(order, CopyToDevice)
        of_nodes = order.transfers[len(more) :]
        shared = [
            _share(transfer, node.values[HOST][index]) if index else transfer
            for transfer, (node, index) in zip(of_nodes, missing, strict=True)
        ]
        self._state.orders[-1] = replace(order, transfers=(*more, *shared))
        return number

    def carry_out_moving(self: SimulatedExecutor, orders: Sequence[Order]) -> None:
        carry_out(self, orders)
        for order in orders:
            for transfer in order.transfers if isinstance(order, CopyToDevice) else ():
                if isinstance(transfer, _SharedTransfer):
                    transfer.move_to_device(len(self.memory.host[transfer.pool].content))

    with ExitStack() as stack:
        stack.enter_context(replaced(LoadingBack, "begin", begin_sharing))
        stack.enter_context(replaced(SimulatedExecutor, "carry_out", carry_out_moving))
        yield


def _share(transfer: CopyTransfer, pages: PageRun | None) -> CopyTransfer:
    assert pages is not None
    return _SharedTransfer(transfer.pool, transfer.sources, transfer.destinations, shared=pages)


@contextmanager
def load_back_from_the_last_host_node() -> Generator[None]:
    """Incident B: admission takes `last_host_node` for `best_match_node`."""

    def reach_last_host(needs: Needs, nodes: list[Node]) -> tuple[int, int, int]:
        device, best, last_host = reach(needs, nodes)
        return device, max(best, last_host), last_host

    with replaced(serving, "reach", reach_last_host):
        yield


@contextmanager
def complete_without_the_other_pools() -> Generator[None]:
    """Incident C: once the pages of full attention have landed, all is taken to have."""
    arrived = Prefetching.arrived

    def arrived_with_kv(self: Prefetching, verdict: Arrived) -> None:
        operation = self.active.get(verdict.operation)
        if operation is not None and operation.phase is Phase.TRANSFER:
            kv = sum(len(each.keys) for each in operation.wanted if not each.component)
            if kv and verdict.pages >= kv:
                verdict = verdict._replace(pages=operation.wanted_count)
        arrived(self, verdict)

    with replaced(Prefetching, "arrived", arrived_with_kv):
        yield


@contextmanager
def cascade_past_pins() -> Generator[None]:
    """Incident D: the cascade stops at locks on the device, and at nothing else."""

    def cascade(self: Residence, node: Node, freed: Freed) -> None:
        while node.parent is not None and not (node.children or node.is_held_on(DEVICE)):
            if self._tree.is_whole(node):
                return
            parent = node.parent
            for tier in TIERS:
                for index in range(len(node.values[tier]) - 1, -1, -1):
                    if node.values[tier][index] is not None:
                        freed[tier][index].extend(self.detach(node, tier, index))
            self._tree.remove(node)
            if parent.parent is None and not parent.children:
                self._emptied(parent)
            node = parent

    with replaced(Residence, "cascade", cascade):
        yield


@contextmanager
def retract_the_kv_alone() -> Generator[None]:
    """Incident E: of what a retracted request had computed in, only the KV pool's part is saved.

    In the other pools it goes on from slots that others have used in between.
    """
    tail = Retracting._tail

    def tail_of_kv(self: Retracting, request: Request, computed_bytes: int) -> list[PageRun]:
        kept = tail(self, request, computed_bytes)
        return [kept[0], *(run[:0] for run in kept[1:])]

    with replaced(Retracting, "_tail", tail_of_kv):
        yield


@contextmanager
def retract_hands_out_views() -> Generator[None]:
    """Incident E, its other half: what a retracted request has of its own is saved as a view.

    What is read when it resumes is what its slots on the device hold by then.
    """
    begin = Copies.begin
    views: dict[tuple[Slots, int], tuple[Slots, int]] = {}
    """By host pool and page: what the page is a view of."""

    def begin_with_views(self: Copies, order: CopyToHost | CopyToDevice, work: Work) -> None:
        for transfer in order.transfers if isinstance(order, CopyToDevice) else ():
            host = self._memory.host[transfer.pool]
            for page in transfer.sources if transfer.sealed else ():
                device, slot = views[host, page]
                host.content[page] = device.content[slot]
        begin(self, order, work)
        for transfer in order.transfers if isinstance(order, CopyToHost) else ():
            host, device = self._memory.host[transfer.pool], self._memory.device[transfer.pool]
            if transfer.sealed:
                for page, slot in zip(transfer.destinations, transfer.sources, strict=True):
                    views[host, page] = device, slot

    with replaced(Copies, "begin", begin_with_views):
        yield
