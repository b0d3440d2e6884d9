"""Retraction: copy all pages of a request to host memory, where they stay until it resumes.

Pages shared with the tree are backed up as usual, and pinned. Unshared pages (partial last page,
working state) are copied to host pages that the request owns. Incident E: the copy covers all pools,
treats every pool alike (as pages), belongs to the request alone, and is verified when it is loaded
back. If the verification fails, the request computes again.
"""

from collections.abc import Sequence

from ...protocol.orders import CopyTransfer
from ...protocol.replica_config import ReplicaConfig
from ..core.pages import PageRun
from ..tree.matching import Missing, lacking
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from ..tree.ref_counts import LockHandle
from ..tree.tokens import TOKEN_BYTES
from .backing_up import BackingUp
from .kinds import Retract
from .lent import Lent
from .operation_table import OperationTable
from .requests import Request, RequestEvent, Requests


class Retraction:
    """Starts retractions, and frees the pages of requests, for owned and lent device pages."""

    def __init__(
        self,
        config: ReplicaConfig,
        prefixes: Prefixes,
        operation_table: OperationTable,
        requests: Requests,
        backing_up: BackingUp,
    ) -> None:
        self._config = config
        self._prefixes = prefixes
        self._allocator = prefixes.allocator
        self._operation_table = operation_table
        self._requests = requests
        self._backing_up = backing_up
        self.shared = [each for each in prefixes.components if each.held_by_requests]
        """The components whose tree-owned device pages a request uses in place while it computes."""

    def begin(
        self,
        request: Request,
        tokens: bytes,
        node: Node,
        tail: Sequence[PageRun],
        lent: Lent | None = None,
    ) -> list[LockHandle] | None:
        """Save a request that has computed `tokens`, whose whole pages end at `node`.

        `tail` are its unshared device pages, by component; the operation owns them from now on unless
        they are lent. Returns pins of the shared pages on the host, which the caller must release.
        Returns None if host memory has no room or the device lacks a page.
        """
        if not self._config.host_pages:
            return None
        allocator, components = self._allocator, self._prefixes.components
        missing = self._off_host(node, lent)
        if any(self._backing_up.source(each, lent) is None for each in missing):
            return None
        pins = allocator.hold(HOST, node, requested=True)
        counts = [len(pages) for pages in tail]
        for each, index in missing:
            counts[index] += components[index].pages_of(each.width)
        taken = self._prefixes.allocator.take(HOST, counts)
        if taken is None:
            allocator.release(pins)
            return None
        lock_handles = allocator.hold(HOST, node, requested=True)
        if lent is None:
            lock_handles += allocator.hold(DEVICE, node, requested=True)
        operation = Retract(
            components=components,
            lock_handles=lock_handles,
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
        self._operation_table.copy(operation, transfers, request.id, counts)
        self._requests.move(request, RequestEvent.SAVE)
        request.waits_for, request.computed = operation.id, len(tokens) // TOKEN_BYTES
        return pins

    def ended(self, operation: Retract) -> None:
        """Apply a retract that finished on every rank: the request now owns the copied pages."""
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, RequestEvent.SAVED)
            request.waits_for = None
            request.saved = [
                operation.disown(HOST, each.index) for each in self._prefixes.components
            ]
        self._backing_up.settle(operation)

    def let_go(self, request: Request) -> None:
        """Free all pages of a request and release its locks and pins, on both tiers."""
        allocator = self._allocator
        allocator.release(request.locks)
        if request.node is not None:
            # Remove nodes without pages (tombstones), which the request's pin may have kept.
            allocator.prune(request.node)
        for index, pages in enumerate(request.device_pages):
            allocator.pools[DEVICE][index].give_back(pages)
        for index, pages in enumerate(request.saved or ()):
            allocator.pools[HOST][index].give_back(pages)
        request.drop_device_pages()
        request.saved, request.locks, request.node, request.prefix = None, (), None, 0

    def lose(self, request: Request, event: RequestEvent) -> None:
        """Free all pages of a request that loses its admission because a copy failed."""
        self._requests.move(request, event)
        self.let_go(request)
        request.waits_for = None
        # Move the request to its namespace's current tree, because a request that starts again must not
        # see prefixes cached before a reset.
        self._requests.renew(request)

    def _off_host(self, node: Node, lent: Lent | None) -> list[Missing]:
        """Return the (node, component) pairs that a resume needs and that must be copied to the host.

        Pairs on the host, or being copied there, are left out.
        """
        missing = lacking(self.shared, node, HOST)
        if lent is not None:
            starts = [lent.needed_from(each) for each in self._prefixes.components]
            missing = [(each, index) for each, index in missing if each.start >= starts[index]]
        return [(each, index) for each, index in missing if not each.is_to_have(HOST, index)]
