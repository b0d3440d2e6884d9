"""Load back: cached pages from host memory to the device.

Where the replica owns the device pages, they go to the tree once they are filled on every rank.
Where the engine owns them, it has lent them, and the operation only reads from the tree.
"""

from ...coordinator.operation import Kind, Outcome, Phase, Queue
from ..orders import KV_POOL, CopyToDevice, CopyTransfer
from .operations import Copy, Segment
from .pages import PageRun, page_run
from .request import Request
from .state import ReplicaState
from .tree import DEVICE, HOST, Node


class LoadingBack:
    """Begins load backs, and applies to the tree what became of them."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def comes_to(self, node: Node) -> bool:
        """Say whether a load back in flight fills this node's device pages."""
        table = self._state.operations.in_flight
        return any(table[number].kind is Kind.LOAD_BACK for number in node.marks)

    def begin(self, request: Request, nodes: list[Node], pages: PageRun) -> int:
        """Copy what `nodes`, which follow each other, have on the host; return the operation."""
        state = self._state
        lent = state.engine_owns_device
        operation = Copy(
            id=state.operations.new_id(),
            kind=Kind.LOAD_BACK,
            phase=Phase.ISSUED,
            request=request.id,
        )
        index = state.component.index
        above = nodes[0].parent
        assert above is not None
        if not lent:
            operation.receipts.append(state.holds.acquire(DEVICE, index, above))
        operation.receipts.append(state.holds.acquire(HOST, index, nodes[-1]))
        segments: list[Segment] = []
        transfers: list[CopyTransfer] = []
        at = 0
        for node in nodes:
            destinations = pages[at : at + node.width]
            at += node.width
            # What the engine lends is no part of the replicated state: it stays in the order.
            segments.append(Segment(node, page_run() if lent else destinations))
            source = node.values[HOST][0]
            assert source is not None
            transfers.append(CopyTransfer(KV_POOL, tuple(source), tuple(destinations)))
        state.operations.add(operation)
        state.mark(operation, segments)
        request.load = operation.id
        state.journal.record("load back", operation.id, request.id, len(pages))
        ticket = state.operations.new_ticket(Queue.LOAD_BACK, operation)
        state.ballot.enqueue(Queue.LOAD_BACK, ticket, operation.id)
        timeout_s = state.config.timeouts.copy_s
        state.orders.append(CopyToDevice(operation.id, tuple(transfers), timeout_s))
        return operation.id

    def request_of(self, operation: Copy) -> Request | None:
        """Return the request that waits for this load back, if one still does."""
        request = self._state.requests.get(operation.request or "")
        return request if request is not None and request.load == operation.id else None

    def loaded(self, operation: Copy) -> Request | None:
        """Give the tree the pages that were filled on every rank; return who waits for them."""
        for segment in operation.segments:
            if segment.pages and segment.node.values[DEVICE][0] is None:
                self._state.attach(segment.node, DEVICE, segment.pages)
                segment.pages = page_run()
        request = self.request_of(operation)
        if request is not None:
            request.load = None
        return request

    def finish(self, operation: Copy) -> None:
        """End a load back that went well."""
        self._state.finish(operation, Outcome.COMPLETE)

    def failed(self, operation: Copy) -> None:
        """Offer the source of a load back that failed no more, and wait until no copy reads it."""
        state = self._state
        nodes = [segment.node for segment in operation.segments]
        state.release_receipts(operation)
        for node in reversed(nodes):
            self._disown_host(operation, node)
        # What others need stays in the tree, pinned until no copy reads it any more.
        kept = [node for node in nodes if node.parent and node.values[HOST][0] is not None]
        if kept:
            pin = state.holds.acquire(HOST, state.component.index, kept[-1])
            operation.receipts.append(pin)
        state.stop(operation, Outcome.FAILED)

    def _disown_host(self, operation: Copy, node: Node) -> None:
        # The host pages may still be read by a copy, so they pass to the operation and not back to
        # the pool. A node that others need on the host keeps them.
        state = self._state
        if node.parent is None or node.values[HOST][0] is None:
            return
        if node.occupied_children[HOST] or node.holds(HOST):
            return
        operation.owned[HOST].extend(state.detach(node, HOST))
        state.journal.record("disown", operation.id, node.id)
        node.marks.discard(operation.id)
        state.remove_if_dead(node)
