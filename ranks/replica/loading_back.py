"""Load back: cached pages from host memory to the device.

Where the replica owns the device pages, they go to the tree once they are filled on every rank.
Where the engine owns them, it has lent them, and the operation only reads from the tree.
"""

from collections.abc import Sequence

from ...coordinator.operation import Kind, Outcome, Phase, Queue
from ..orders import CopyToDevice, CopyTransfer
from .matching import Missing
from .operations import Copy, Segment
from .pages import PageRun, page_run
from .request import Request
from .state import ReplicaState
from .tree import DEVICE, HOST, Node


class LoadingBack:
    """Begins load backs, and applies to the tree what became of them."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def comes_to(self, missing: Missing) -> bool:
        """Say whether a load back in flight fills these device pages."""
        return self._state.fills(missing[0], DEVICE, missing[1])

    def begin(
        self,
        request: Request,
        last: Node,
        missing: Sequence[Missing],
        pages: Sequence[PageRun],
        more: Sequence[CopyTransfer] = (),
    ) -> int:
        """Copy what is missing on the path to `last` from the host; return the operation.

        `pages` are device pages by component, as many as are missing: the operation's own from now
        on, or lent by the engine. `more` is copied with it.
        """
        state = self._state
        lent = state.engine_owns_device
        operation = Copy(
            id=state.operations.new_id(),
            kind=Kind.LOAD_BACK,
            phase=Phase.ISSUED,
            request=request.id,
        )
        for tier in (HOST,) if lent else (DEVICE, HOST):
            operation.receipts += state.residence.hold(tier, last)
        segments: list[Segment] = []
        transfers: list[CopyTransfer] = [*more]
        at = [0] * len(state.components)
        for node, index in missing:
            component = state.components[index]
            width = component.pages_of(node.width)
            destinations = pages[index][at[index] : at[index] + width]
            at[index] += width
            # What the engine lends is no part of the replicated state: it stays in the order.
            segments.append(Segment(node, index, page_run() if lent else destinations))
            source = node.values[HOST][index]
            assert source is not None
            transfers.append(CopyTransfer(component.pool, tuple(source), tuple(destinations)))
        state.operations.add(operation)
        state.mark(operation, segments)
        request.load = operation.id
        state.journal.record("load back", operation.id, request.id, at)
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
            node, component = segment.node, segment.component
            if segment.pages and node.values[DEVICE][component] is None:
                self._state.residence.attach(node, DEVICE, component, segment.pages)
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
        read = [(segment.node, segment.component) for segment in operation.segments]
        state.release_receipts(operation)
        for node, component in reversed(read):
            self._disown_host(operation, node, component)
        # What others need stays in the tree, pinned until no copy reads it any more.
        kept = [n for n, component in read if n.parent and n.values[HOST][component] is not None]
        if kept:
            last = max(kept, key=lambda node: node.end)
            operation.receipts += state.residence.hold(HOST, last)
        state.stop(operation, Outcome.FAILED)

    def _disown_host(self, operation: Copy, node: Node, component: int) -> None:
        # The host pages may still be read by a copy, so they pass to the operation and not back to
        # the pool. A node that others need on the host keeps them.
        state, residence = self._state, self._state.residence
        if node.parent is None or node.values[HOST][component] is None:
            return
        if node.held[HOST][component]:
            return
        if component:
            operation.own(HOST, component, residence.detach(node, HOST, component))
        elif node.occupied_children[HOST] or node.is_held_on(HOST):
            return
        else:
            freed = residence.nothing_freed()
            residence.detach_all(node, HOST, freed)
            for index, pages in enumerate(freed[HOST]):
                operation.own(HOST, index, pages)
        state.journal.record("disown", operation.id, node.id, component)
        residence.remove_if_dead(node)
