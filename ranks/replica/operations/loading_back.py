"""Load back: copy cached pages from host memory to the device.

Owned device pages are attached to the tree once every rank has filled them. Lent device pages are not
attached; a load into lent pages only reads from the tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ....coordinator.operation import Outcome
from ...protocol.events import Cause
from ...protocol.orders import CopyTransfer
from ..core.journal import Journal
from ..core.pages import PageRun, page_run
from ..tree.components import Component
from ..tree.matching import Missing
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from .kinds import LoadBack, Loading, Resume, Segment
from .operation_table import OperationTable
from .requests import Request, RequestEvent, Requests


class TailPages(NamedTuple):
    """The pages of a retracted request that belong to no tree node, by component and tier."""

    device: Sequence[PageRun]
    host: Sequence[PageRun]
    """Host pages that were saved with a checksum, which the copy verifies; see `orders.CopyTransfer`.
    """


class LoadingBack:
    """Starts load backs, and applies their outcome to the tree."""

    def __init__(
        self,
        prefixes: Prefixes,
        operation_table: OperationTable,
        requests: Requests,
        journal: Journal,
    ) -> None:
        self._prefixes = prefixes
        self._allocator = prefixes.allocator
        self._operation_table = operation_table
        self._requests = requests
        self._journal = journal

    def begin(
        self,
        request: Request,
        last: Node,
        missing: Sequence[Missing],
        pages: Sequence[PageRun],
        tail: TailPages | None = None,
        *,
        lent: bool = False,
    ) -> None:
        """Copy the pages missing on the path to `last` from the host; the request waits for the copy.

        `pages` are the device pages to fill, by component. Unless `lent`, the operation owns them from
        now on. With a `tail` (the unshared pages of a retracted request), the operation is a `Resume`
        and owns the tail, too.
        """
        lock_handles = self._allocator.hold(HOST, last)
        if not lent:
            lock_handles += self._allocator.hold(DEVICE, last)
        segments: dict[Segment, PageRun] = {}
        transfers: list[CopyTransfer] = [] if tail is None else self._bring(tail)
        at = [0] * len(self._prefixes.components)
        for node, index in missing:
            component = self._prefixes.components[index]
            start, at[index] = at[index], at[index] + component.pages_of(node.width)
            destinations = pages[index][start : at[index]]
            # Lent page numbers differ between ranks, so they appear only in the order to the executor,
            # not in the operation.
            segments[Segment(node, index)] = page_run() if lent else destinations
            transfers.append(self._transfer(node, component, destinations))
        kind = LoadBack if tail is None else Resume
        operation = kind(
            components=self._prefixes.components,
            lock_handles=lock_handles,
            segments=segments,
            request=request.id,
            lent=sum(at) if lent else 0,
        )
        if tail is not None:
            for index, (device, host) in enumerate(zip(tail.device, tail.host, strict=True)):
                operation.own(HOST, index, host)
                if not lent:
                    operation.own(DEVICE, index, device)
        self._requests.move(request, RequestEvent.LOAD)
        self._operation_table.copy(operation, transfers, request.id, at)
        request.waits_for = operation.id

    def settle(self, operation: Loading) -> Request | None:
        """Attach owned pages that every rank has filled; return the request that waited for them."""
        for segment, pages in operation.segments.items():
            node, component = segment
            if pages and node.values[DEVICE][component] is None:
                mine = operation.give(segment)
                self._allocator.attach(node, DEVICE, component, mine, Cause.LOADED)
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._requests.move(request, RequestEvent.LOADED)
            request.waits_for = None
        return request

    def note_failed(self, operation: Loading) -> None:
        """Record the last position that a load failed to copy, to attribute the request's misses."""
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            end = max((node.end for node, _ in operation.segments), default=0)
            request.sought = request.sought._replace(failed=end)

    def failed(self, operation: Loading) -> None:
        """Remove a failed load's source pages from the tree; free them once no copy reads them."""
        allocator = self._allocator
        read = operation.in_order()
        self._operation_table.release_locks(operation)
        for node, component in reversed(read):
            self._disown_host(operation, node, component)
        # Other requests or operations keep some of these host pages in the tree. Pin such pages until
        # no copy reads them.
        kept = [n for n, component in read if n.parent and n.values[HOST][component] is not None]
        if kept:
            last = max(kept, key=lambda node: node.end)
            operation.lock_handles += allocator.hold(HOST, last)
        self._operation_table.stop(operation, Outcome.FAILED)

    def _transfer(self, node: Node, component: Component, destinations: PageRun) -> CopyTransfer:
        """Return the transfer from a node's host pages to the device pages `destinations`."""
        source = node.values[HOST][component.index]
        assert source is not None
        return CopyTransfer(component.pool, tuple(source), tuple(destinations))

    def _bring(self, tail: TailPages) -> list[CopyTransfer]:
        pages = zip(self._prefixes.components, tail.device, tail.host, strict=True)
        return [
            CopyTransfer(component.pool, tuple(host), tuple(device), sealed=True)
            for component, device, host in pages
            if device
        ]

    def _disown_host(self, operation: Loading, node: Node, component: int) -> None:
        # Make the operation the owner of the host pages instead of freeing them, because a copy may
        # still read them. A node that another request or operation pins keeps its pages.
        allocator = self._allocator
        if node.parent is None or node.values[HOST][component] is None:
            return
        if node.held[HOST][component]:
            return
        leaving = allocator.leaving(Cause.FAILED)
        if component:
            allocator.detach(node, HOST, component, leaving)
        elif node.occupied_children[HOST] or node.is_held_on(HOST):
            return
        else:
            allocator.detach_all(node, HOST, leaving)
        for index, pages in enumerate(leaving.runs[HOST]):
            operation.own(HOST, index, pages)
        allocator.publish_removed(leaving)
        self._journal.record("disown", operation.id, node.id, component)
        allocator.remove_if_dead(node)
