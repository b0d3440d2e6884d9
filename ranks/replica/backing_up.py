"""Backup and persist: computed pages to host memory, and from there to storage.

Under write-through every node that an insert has touched and that is not on the host is backed up,
parents first, and what has been backed up on every rank is persisted.
"""

from collections import deque

from ...coordinator.operation import Kind, Outcome, Phase, Queue
from ...errors import InternalError
from ..orders import KV_POOL, CopyToHost, CopyTransfer, ObjectTransfer
from ..orders import Persist as PersistOrder
from .operations import Copy, Persist, Segment
from .pages import PageRun, page_run
from .state import ReplicaState
from .tree import DEVICE, HOST, Node

Lent = tuple[str, PageRun]
"""A request and the device pages of its prefix, from the first on, that the engine lends for it."""


class BackingUp:
    """Begins backups and persists, and applies their outcomes."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.waiting: deque[Persist] = deque()
        self.issued = 0
        """Persists whose order was given and that have not settled."""

    def write_through(self, node: Node, lent: Lent | None = None) -> int | None:
        """Back up what of the path to `node` is not on the host, from the top as far as there is room.

        From the top, since a backed-up child implies a backed-up parent. What is copied are the
        nodes' device pages, or those that are lent. Returns the operation, if one was needed.
        """
        state = self._state
        if not state.config.host_pages:
            return None
        segments: list[Segment] = []
        room = self._room_beside(node)
        for each in reversed(list(node.path())):
            if each.values[HOST][0] is not None or self.comes_to(each):
                continue
            if each.width <= room:
                segments.append(Segment(each, page_run()))
                room -= each.width
                continue
            state.operations.outcomes[Kind.BACKUP, Outcome.NO_ROOM] += 1
            if room:
                state.split(each, room)
                assert each.parent is not None
                segments.append(Segment(each.parent, page_run()))
            break
        return self._begin_backup(segments, lent) if segments else None

    def comes_to(self, node: Node) -> bool:
        """Say whether a backup in flight fills this node's host pages."""
        table = self._state.operations.in_flight
        return any(table[number].kind is Kind.BACKUP for number in node.marks)

    def _room_beside(self, node: Node) -> int:
        """Return how many host pages are to be had without any of the path to `node`."""
        state = self._state
        pin = state.holds.acquire(HOST, state.component.index, node)
        room = state.available(HOST)
        state.holds.release(pin)
        return room

    def backed_up(self, operation: Copy) -> None:
        """Apply a backup that has ended on every rank."""
        state = self._state
        settled: list[Node] = []
        for segment in operation.segments:
            node, parent = segment.node, segment.node.parent
            assert parent is not None
            parent_is_there = parent.parent is None or parent.values[HOST][0] is not None
            if node.values[HOST][0] is None and parent_is_there:
                state.attach(node, HOST, segment.pages)
                segment.pages = page_run()
                settled.append(node)
        state.finish(operation, Outcome.COMPLETE)
        unsaved = [node for node in settled if not node.persisted]
        if unsaved and state.store_attached:
            self._persist(unsaved)

    def persisted(self, operation: Persist) -> None:
        """Apply a persist that has ended on every rank."""
        for segment in operation.segments:
            segment.node.persisted = True
            for key in self._state.tree.keys(segment.node):
                self._state.misses.pop(key, None)
        self.issued -= 1
        self._state.finish(operation, Outcome.COMPLETE)
        self.begin_waiting()

    def persist_failed(self, operation: Persist) -> None:
        """Apply a persist that failed on some rank; its pages are held until all are quiet."""
        self.issued -= 1
        self._state.stop(operation, Outcome.FAILED)
        self.begin_waiting()

    def begin_waiting(self) -> None:
        """Give the orders of the persists whose turn has come, in the order of their ids."""
        state = self._state
        while self.waiting and self.issued < state.config.bounds.persists:
            operation = self.waiting.popleft()
            state.advance(operation, Phase.ISSUED)
            self.issued += 1
            ticket = state.operations.new_ticket(Queue.PERSIST, operation)
            state.ballot.enqueue(Queue.PERSIST, ticket, operation.id)
            transfers = tuple(
                ObjectTransfer(KV_POOL, tuple(state.tree.keys(segment.node)), tuple(segment.pages))
                for segment in operation.segments
            )
            timeout_s = state.config.timeouts.persist_s
            state.orders.append(PersistOrder(operation.id, transfers, timeout_s))

    def abandon_waiting(self) -> None:
        """End the persists that have not begun: the store is detached."""
        while self.waiting:
            self._state.finish(self.waiting.popleft(), Outcome.ABORTED)

    def _begin_backup(self, segments: list[Segment], lent: Lent | None) -> int:
        state = self._state
        last = segments[-1].node
        operation = Copy(id=state.operations.new_id(), kind=Kind.BACKUP, phase=Phase.ISSUED)
        # The sources must not be evicted, and ancestors on the host must stay there: taking the
        # pages below may evict, so the holds come first.
        for tier in (DEVICE, HOST) if lent is None else (HOST,):
            operation.receipts.append(state.holds.acquire(tier, state.component.index, last))
        pages = state.take(HOST, sum(segment.node.width for segment in segments))
        if pages is None:
            raise InternalError("a backup finds less room on the host than was counted for it")
        state.operations.add(operation)
        at = 0
        for segment in segments:
            segment.pages = pages[at : at + segment.node.width]
            at += segment.node.width
        state.mark(operation, segments)
        transfers = tuple(
            CopyTransfer(KV_POOL, tuple(_sources(segment.node, lent)), tuple(segment.pages))
            for segment in segments
        )
        state.journal.record("backup", operation.id, last.id, len(pages))
        ticket = state.operations.new_ticket(Queue.BACKUP, operation)
        state.ballot.enqueue(Queue.BACKUP, ticket, operation.id)
        state.orders.append(CopyToHost(operation.id, transfers, state.config.timeouts.copy_s))
        return operation.id

    def _persist(self, nodes: list[Node]) -> None:
        state = self._state
        if self.waiting and len(self.waiting) >= state.config.bounds.persists_waiting:
            state.operations.outcomes[Kind.PERSIST, Outcome.NO_ROOM] += 1
            return
        operation = Persist(id=state.operations.new_id(), kind=Kind.PERSIST, phase=Phase.WAITING)
        operation.receipts.append(state.holds.acquire(HOST, state.component.index, nodes[-1]))
        segments = [
            Segment(node, page_run(pages))
            for node in nodes
            if (pages := node.values[HOST][0]) is not None
        ]
        state.operations.add(operation)
        state.mark(operation, segments)
        state.journal.record("persist", operation.id, nodes[-1].id)
        self.waiting.append(operation)
        self.begin_waiting()


def _sources(node: Node, lent: Lent | None) -> PageRun:
    if lent is not None:
        return lent[1][node.start : node.end]
    pages = node.values[DEVICE][0]
    assert pages is not None
    return pages
