"""Saving a request: all that it uses goes to host memory, and stays there until it comes back.

What it shares with the tree is backed up like anything else, and pinned. What is its own, a page that
is not full yet or the state it works on, is copied to host pages of its own. Incident E: the copy is
complete over all pools, it belongs to the request alone until it comes back, every pool's part is
the same kind of thing (pages), and its bytes are checked when it returns. What has gone wrong in
between is found out, and the request computes anew.
"""

from collections.abc import Sequence

from ...protocol.orders import CopyTransfer
from ...protocol.replica_config import ReplicaConfig
from ..core.pages import PageRun
from ..tree.holds import Receipt
from ..tree.matching import Missing, lacking
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from ..tree.tokens import TOKEN_BYTES
from .agenda import Agenda
from .backing_up import BackingUp
from .kinds import Retract
from .lent import Lent
from .requests import Event, Request, Requests


class Saving:
    """Begins to save requests, and lets go of what was saved; whoever owns the device pages."""

    def __init__(
        self,
        config: ReplicaConfig,
        prefixes: Prefixes,
        agenda: Agenda,
        requests: Requests,
        backing_up: BackingUp,
    ) -> None:
        self._config = config
        self._prefixes = prefixes
        self._residence = prefixes.residence
        self._agenda = agenda
        self._requests = requests
        self._backing_up = backing_up
        self.shared = [each for each in prefixes.components if each.held_by_requests]
        """The components of which a request uses what lies in the tree."""

    def begin(
        self,
        request: Request,
        tokens: bytes,
        node: Node,
        tail: Sequence[PageRun],
        lent: Lent | None = None,
    ) -> list[Receipt] | None:
        """Save a request that has computed `tokens`, whose whole pages lead to `node`.

        `tail` is what it has beside, by component: device pages that belong to the operation from
        now on, or lent ones. Returns the pins that keep on the host what it shares, which are the
        caller's; None if host memory has no room, or the device not all of it.
        """
        if not self._config.host_pages:
            return None
        residence, components = self._residence, self._prefixes.components
        missing = self._off_host(node, lent)
        if any(self._backing_up.source(each, lent) is None for each in missing):
            return None
        pins = residence.hold(HOST, node, requested=True)
        counts = [len(pages) for pages in tail]
        for each, index in missing:
            counts[index] += components[index].pages_of(each.width)
        taken = self._prefixes.residence.take(HOST, counts)
        if taken is None:
            residence.release(pins)
            return None
        receipts = residence.hold(HOST, node, requested=True)
        if lent is None:
            receipts += residence.hold(DEVICE, node, requested=True)
        operation = Retract(
            components=components,
            receipts=receipts,
            segments=self._backing_up.divide(missing, taken),
            request=request.id,
            lent=0 if lent is None else node.end,
            lender="" if lent is None else lent.request,
        )
        transfers = self._backing_up.transfers(operation.segments, lent)
        for component, device, host in zip(components, tail, taken, strict=True):
            if device:
                pages = tuple(device), tuple(host)
                transfers.append(CopyTransfer(component.pool, *pages, sealed=True))
            operation.own(HOST, component.index, host)
            if lent is None:
                operation.own(DEVICE, component.index, device)
        self._agenda.copy(operation, transfers, request.id, counts)
        self._requests.move(request, Event.SAVE)
        request.waits_for, request.computed = operation.id, len(tokens) // TOKEN_BYTES
        return pins

    def ended(self, operation: Retract) -> None:
        """Apply a retract that has ended on every rank: the copy is the request's from now on."""
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, Event.SAVED)
            request.waits_for = None
            request.saved = [
                operation.disown(HOST, each.index) for each in self._prefixes.components
            ]
        self._backing_up.settle(operation)

    def let_go(self, request: Request) -> None:
        """Give back all that a request holds on either tier."""
        residence = self._residence
        residence.release(request.locks)
        if request.node is not None:
            # What was evicted, or could not be copied, may have been kept for it as a tombstone.
            residence.prune(request.node)
        for index, pages in enumerate(request.device_pages):
            residence.pools[DEVICE][index].give_back(pages)
        for index, pages in enumerate(request.saved or ()):
            residence.pools[HOST][index].give_back(pages)
        request.drop_device_pages()
        request.saved, request.locks, request.node, request.prefix = None, (), None, 0

    def lose(self, request: Request, event: Event) -> None:
        """Give up all that a request holds: it goes on as one that is not admitted."""
        self._requests.move(request, event)
        self.let_go(request)
        request.waits_for = None
        # What was cached before a reset is offered to no request that begins anew.
        self._requests.renew(request)

    def _off_host(self, node: Node, lent: Lent | None) -> list[Missing]:
        """Return what a resume needs of the tree that is not on the host, nor on its way there."""
        missing = lacking(self.shared, node, HOST)
        if lent is not None:
            starts = [lent.needed_from(each) for each in self._prefixes.components]
            missing = [(each, index) for each, index in missing if each.start >= starts[index]]
        return [(each, index) for each, index in missing if not each.is_to_have(HOST, index)]
