"""Retract and resume: a request leaves the device with all that it holds, and comes back.

What it shares with the tree is backed up like anything else, and pinned. What is its own, a page that
is not full yet or the state it works on, is copied to host pages of its own. Incident E: the copy is
complete over all pools, it belongs to the request alone until it comes back, every pool's part is
the same kind of thing (pages), and its bytes are checked when it returns. What has gone wrong in
between is found out, and the request computes anew.
"""

from ...coordinator.operation import Kind, Phase, Queue
from ...errors import UsageError
from ..orders import CopyToHost, CopyTransfer
from .backing_up import BackingUp
from .loading_back import LoadingBack
from .matching import Missing, lacking
from .operations import Copy, Segment
from .pages import PageRun, page_run
from .request import Request
from .serving import Admission, Serving, Wait
from .state import ReplicaState
from .tokens import TOKEN_BYTES
from .tree import DEVICE, HOST, Node


class Retracting:
    """Takes requests off the device and brings them back."""

    def __init__(
        self,
        state: ReplicaState,
        serving: Serving,
        loading_back: LoadingBack,
        backing_up: BackingUp,
    ) -> None:
        self._state = state
        self._serving = serving
        self._loading_back = loading_back
        self._backing_up = backing_up
        self._shared = [each for each in state.components if each.held_by_requests]
        """The components of which a request uses what lies in the tree."""

    def retract(self, request: Request, tokens: bytes) -> bool:
        """Copy all that a request holds to host memory; its device pages are free once that is done.

        `tokens` are all that it has computed; their whole pages are published. False, and it goes on,
        if host memory has no room for it.
        """
        state, residence = self._state, self._state.residence
        self._serving.require_room(request, len(tokens))
        self._serving.insert(request, tokens, final=False)
        if not state.config.host_pages:
            return False
        node = request.node
        assert node is not None
        missing = self._off_host(node)
        tail = self._tail(request, len(tokens))
        pins = residence.hold(HOST, node, requested=True)
        counts = [len(pages) for pages in tail]
        for each, index in missing:
            counts[index] += state.components[index].pages_of(each.width)
        taken = residence.take(HOST, counts)
        if taken is None:
            for pin in pins:
                residence.holds.release(pin)
            return False
        operation = Copy(
            id=state.operations.new_id(), kind=Kind.BACKUP, phase=Phase.ISSUED, request=request.id
        )
        for tier in (DEVICE, HOST):
            operation.receipts += residence.hold(tier, node, requested=True)
        segments, transfers = self._segments(missing, taken)
        for component, device in zip(state.components, tail, strict=True):
            host = taken[component.index]
            if device:
                transfers.append(
                    CopyTransfer(component.pool, tuple(device), tuple(host), sealed=True)
                )
            operation.own(DEVICE, component.index, device)
            operation.own(HOST, component.index, host)
        state.operations.add(operation)
        state.mark(operation, segments)
        # The tail's pages belong to the operation now, and the others that it had reserved are free.
        request.own = [run[len(part) :] for run, part in zip(request.own, tail, strict=True)]
        self._serving.let_go(request)
        request.locks, request.node, request.prefix = pins, node, node.end
        request.admitted = True
        request.retract, request.computed = operation.id, len(tokens) // TOKEN_BYTES
        state.journal.record("retract", operation.id, request.id, counts)
        ticket = state.operations.new_ticket(Queue.BACKUP, operation)
        state.ballot.enqueue(Queue.BACKUP, ticket, operation.id)
        timeout_s = state.config.timeouts.copy_s
        state.orders.append(CopyToHost(operation.id, tuple(transfers), timeout_s))
        return True

    def retracted(self, operation: Copy) -> None:
        """Apply a retract that has ended on every rank: the copy is the request's from now on."""
        request = self._request_of(operation)
        if request is not None:
            request.retract = None
            request.saved = [
                operation.owned.pop((HOST, each.index), page_run())
                for each in self._state.components
            ]
        self._backing_up.backed_up(operation)

    def failed(self, operation: Copy) -> None:
        """A retract has failed on some rank: the request computes anew."""
        request = self._request_of(operation)
        if request is not None:
            request.retract = None
            request.load_failed = True
            self._serving.let_go(request)

    def resume(self, request: Request, reserve_tokens: int) -> Admission | Wait:
        """Bring a retracted request back to the device, or say why that has to wait."""
        state, residence = self._state, self._state.residence
        if request.saved is None or request.node is None:
            raise UsageError(f"request {request.id!r} is not retracted; nothing can be resumed")
        node, saved = request.node, request.saved
        missing = lacking(self._shared, node, DEVICE)
        if any(self._loading_back.comes_to(each) for each in missing):
            return Wait.LOADING
        if any(each.values[HOST][index] is None for each, index in missing):
            # A backup of it that somebody else had begun has failed.
            self._serving.let_go(request)
            return Wait.LOST
        pages = self._serving.take(node, missing, self._room(request, reserve_tokens))
        if pages is None:
            return Wait.NO_ROOM
        loading, own, locks = pages
        for pin in request.locks:
            residence.holds.release(pin)
        request.locks, request.saved, request.load_failed = locks, None, False
        request.admitted = True
        tail = [run[: len(host)] for run, host in zip(own, saved, strict=True)]
        request.own = [run[len(host) :] for run, host in zip(own, saved, strict=True)]
        state.tick()
        state.use(node)
        number = self._begin(request, lacking(self._shared, node, DEVICE), loading, tail, saved)
        return Admission(
            device_tokens=0,
            host_tokens=request.computed,
            storage_tokens=0,
            operation=number,
        )

    def _begin(
        self,
        request: Request,
        missing: list[Missing],
        loading: list[PageRun],
        tail: list[PageRun],
        saved: list[PageRun],
    ) -> int:
        state = self._state
        assert request.node is not None
        transfers: list[CopyTransfer] = []
        for component, device, host in zip(state.components, tail, saved, strict=True):
            if device:
                transfers.append(
                    CopyTransfer(component.pool, tuple(host), tuple(device), sealed=True)
                )
        number = self._loading_back.begin(request, request.node, missing, loading, transfers)
        operation = state.operations.in_flight[number]
        assert isinstance(operation, Copy)
        operation.resumes = True
        for component, device, host in zip(state.components, tail, saved, strict=True):
            operation.own(DEVICE, component.index, device)
            operation.own(HOST, component.index, host)
        return number

    def _request_of(self, operation: Copy) -> Request | None:
        request = self._state.requests.get(operation.request or "")
        return request if request is not None and request.retract == operation.id else None

    def _off_host(self, node: Node) -> list[Missing]:
        """Return what a resume needs of the tree that is not on the host, nor on its way there."""
        return [
            (each, index)
            for each, index in lacking(self._shared, node, HOST)
            if not self._state.fills(each, HOST, index)
        ]

    def _tail(self, request: Request, computed_bytes: int) -> list[PageRun]:
        """Return what of a request's own pages, by component, holds something."""
        state = self._state
        begun_page = int(computed_bytes > request.prefix * state.tree.page_bytes)
        # Before the first token, the state is the engine's to begin with.
        has_state = int(computed_bytes > 0)
        return [
            request.own[component.index][: begun_page if component.per_page else has_state]
            for component in state.components
        ]

    def _room(self, request: Request, reserve_tokens: int) -> list[int]:
        """Return the own pages, by component, that a resumed request needs."""
        state = self._state
        assert request.saved is not None
        reserved = -(-reserve_tokens // state.config.page_tokens) - request.prefix
        return [
            max(len(host), reserved) if component.per_page else 1
            for component, host in zip(state.components, request.saved, strict=True)
        ]

    def _segments(
        self, missing: list[Missing], taken: list[PageRun]
    ) -> tuple[list[Segment], list[CopyTransfer]]:
        """Divide the first of the pages taken among what is missing; the rest stays in `taken`."""
        segments: list[Segment] = []
        transfers: list[CopyTransfer] = []
        for node, index in missing:
            component = self._state.components[index]
            width = component.pages_of(node.width)
            pages, taken[index] = taken[index][:width], taken[index][width:]
            source = node.values[DEVICE][index]
            assert source is not None
            segments.append(Segment(node, index, pages))
            transfers.append(CopyTransfer(component.pool, tuple(source), tuple(pages)))
        return segments, transfers
