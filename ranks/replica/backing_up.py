"""Backup and persist: computed pages to host memory, and from there to storage.

Under write-through every node that an insert has touched and that is not on the host is backed up,
parents first, and what has been backed up on every rank is persisted. Of full attention that is the
whole path; of the other components what a match at its end needs, and only if they have it all: a
window with a gap, or one without the state beside it, would restore nothing.
"""

from collections import deque

from ...coordinator.operation import Kind, Outcome, Phase, Queue
from ...errors import InternalError
from ..config import WritePolicy
from ..orders import CopyToHost, CopyTransfer, ObjectTransfer
from ..orders import Persist as PersistOrder
from .matching import lacking
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
        if state.config.write_policy is WritePolicy.WRITE_BACK:
            state.residence.saves = self._saves
        self.issued = 0
        """Persists whose order was given and that have not settled."""

    def was_computed(self, node: Node) -> None:
        """A request has published the path to `node`."""
        if self._state.config.write_policy is WritePolicy.WRITE_THROUGH:
            self.write_through(node)

    def was_hit(self, node: Node) -> None:
        """A request has found the path to `node` cached."""
        config = self._state.config
        if config.write_policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        worth = next((each for each in node.path() if each.hits >= config.selective_hits), None)
        if worth is not None:
            self.write_through(worth)

    def write_through(self, node: Node, lent: Lent | None = None) -> int | None:
        """Back up what of the path to `node` is not on the host, from the top as far as there is room.

        From the top, since a backed-up child implies a backed-up parent. What is copied are the
        nodes' device pages, or those that are lent. Returns the operation, if one was needed.
        """
        state = self._state
        if not state.config.host_pages:
            return None
        residence = state.residence
        # What is on the host of the path must stay there while room is made beside it.
        pins = residence.hold(HOST, node)
        room = [residence.available(HOST, each.index) for each in state.components]
        for pin in pins:
            residence.holds.release(pin)
        segments, whole = self._full_attention(node, room[0])
        if whole:
            segments += self._others(node, room)
        if not segments:
            return None
        return self._begin_backup(node if whole else segments[-1].node, segments, lent)

    def comes_to(self, node: Node) -> bool:
        """Say whether a backup in flight fills this node's host pages of full attention."""
        return self._state.fills(node, HOST, 0)

    def _saves(self, node: Node, component: int) -> bool:
        """Back up a node whose pages of a component are to leave; say if they have to stay for that.

        Once for each use of the node: where host memory is small, the copies of those that leave
        together drive each other out, and none of them would ever go.
        """
        lost = any(
            node.values[DEVICE][each.index] is not None and node.values[HOST][each.index] is None
            for each in self._state.components
        )
        if lost and node.saved_at != node.last_access:
            node.saved_at = node.last_access
            self.write_through(node)
        return node.held[DEVICE][component] > 0

    def _full_attention(self, node: Node, room: int) -> tuple[list[Segment], bool]:
        """Return what to back up of full attention, and whether it is all."""
        state = self._state
        segments: list[Segment] = []
        for each in node.path_down():
            if each.values[HOST][0] is not None or self.comes_to(each):
                continue
            if each.width <= room:
                segments.append(Segment(each, 0, page_run()))
                room -= each.width
                continue
            state.operations.outcomes[Kind.BACKUP, Outcome.NO_ROOM] += 1
            if room:
                state.split(each, room)
                assert each.parent is not None
                segments.append(Segment(each.parent, 0, page_run()))
            return segments, False
        return segments, True

    def _others(self, node: Node, room: list[int]) -> list[Segment]:
        """Return what to back up of the other components, so that a match may end at `node`."""
        state = self._state
        segments: list[Segment] = []
        state.cut_for(node)
        if not state.tree.is_whole(node):
            return segments
        for component in state.components[1:]:
            index = component.index
            missing = [
                each
                for each, _ in lacking((component,), node, HOST)
                if not state.fills(each, HOST, index)
            ]
            pages = sum(component.pages_of(each.width) for each in missing)
            on_device = all(each.values[DEVICE][index] is not None for each in missing)
            if pages > room[index] or not on_device:
                if pages > room[index]:
                    state.operations.outcomes[Kind.BACKUP, Outcome.NO_ROOM] += 1
                return []
            segments += [Segment(each, index, page_run()) for each in missing]
        return segments

    def backed_up(self, operation: Copy) -> None:
        """Apply a backup that has ended on every rank."""
        state = self._state
        settled: list[Segment] = []
        for segment in operation.segments:
            node, component = segment.node, segment.component
            if node.values[HOST][component] is None and self._may_attach(node, component):
                state.residence.attach(node, HOST, component, segment.pages)
                segment.pages = page_run()
                settled.append(segment)
        state.finish(operation, Outcome.COMPLETE)
        keeps = state.store_attached and bool(settled) and state.keeps(settled[0].node.place)
        unsaved = self._unsaved(settled) if keeps else []
        if unsaved:
            self._persist(unsaved)

    def _may_attach(self, node: Node, component: int) -> bool:
        if component:
            return node.values[HOST][0] is not None
        parent = node.parent
        assert parent is not None
        return parent.parent is None or parent.values[HOST][0] is not None

    def persisted(self, operation: Persist) -> None:
        """Apply a persist that has ended on every rank."""
        state = self._state
        for segment in operation.segments:
            state.offer(segment.node, segment.component)
            pool = state.components[segment.component].pool
            for key in self._keys(segment):
                state.misses.pop((pool, key), None)
        self.issued -= 1
        state.finish(operation, Outcome.COMPLETE)
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
                ObjectTransfer(
                    state.components[segment.component].pool,
                    self._keys(segment),
                    tuple(segment.pages),
                )
                for segment in operation.segments
            )
            timeout_s = state.config.timeouts.persist_s
            state.orders.append(PersistOrder(operation.id, transfers, timeout_s))

    def abandon(self) -> None:
        """End the persists that have not begun, and stop the others: the store is detached."""
        state = self._state
        while self.waiting:
            state.finish(self.waiting.popleft(), Outcome.ABORTED)
        line = state.operations.queues[Queue.PERSIST]
        while line:
            ticket, number = line.popleft()
            state.ballot.settle(Queue.PERSIST, ticket)
            self.issued -= 1
            state.stop(state.operations.in_flight[number], Outcome.ABORTED)

    def _begin_backup(self, last: Node, segments: list[Segment], lent: Lent | None) -> int:
        state = self._state
        operation = Copy(id=state.operations.new_id(), kind=Kind.BACKUP, phase=Phase.ISSUED)
        # The sources must not be evicted, and ancestors on the host must stay there: taking the
        # pages below may evict, so the holds come first.
        operation.receipts += state.residence.hold(HOST, last)
        if lent is None:
            # What lies deeper is on the host already, and need not be on the device.
            deepest = max((each.node for each in segments), key=lambda node: node.end)
            operation.receipts += state.residence.hold(DEVICE, deepest)
        else:
            operation.lent = last.end
        counts = [0] * len(state.components)
        for segment in segments:
            counts[segment.component] += self._width(segment)
        taken = state.residence.take(HOST, counts)
        if taken is None:
            raise InternalError("a backup finds less room on the host than was counted for it")
        state.operations.add(operation)
        for segment in segments:
            width, pages = self._width(segment), taken[segment.component]
            segment.pages, taken[segment.component] = pages[:width], pages[width:]
        state.mark(operation, segments)
        transfers = tuple(
            CopyTransfer(
                state.components[segment.component].pool,
                tuple(_sources(segment, lent)),
                tuple(segment.pages),
            )
            for segment in segments
        )
        state.journal.record("backup", operation.id, last.id, counts)
        ticket = state.operations.new_ticket(Queue.BACKUP, operation)
        state.ballot.enqueue(Queue.BACKUP, ticket, operation.id)
        state.orders.append(CopyToHost(operation.id, transfers, state.config.timeouts.copy_s))
        return operation.id

    def _unsaved(self, settled: list[Segment]) -> list[Segment]:
        """Return what of `settled` the store lacks, after the path above as far as it never saw it.

        What was in host memory before the store was attached goes there with the first of its
        descendants that does: a prefix without its beginning could not be found.
        """
        state = self._state
        new = [each for each in settled if not state.is_persisted(each.node, each.component)]
        if not new:
            return []
        full = {id(each.node) for each in settled if not each.component}
        last = max((each.node for each in new), key=lambda node: node.end)
        above = [
            Segment(node, 0, page_run())
            for node in last.path()
            if node.store != state.store_number
            and id(node) not in full
            and node.values[HOST][0] is not None
        ]
        return above[::-1] + new

    def _persist(self, settled: list[Segment]) -> None:
        state = self._state
        for each in settled:
            state.offer(each.node)
        if self.waiting and len(self.waiting) >= state.config.bounds.persists_waiting:
            state.operations.outcomes[Kind.PERSIST, Outcome.NO_ROOM] += 1
            return
        operation = Persist(id=state.operations.new_id(), kind=Kind.PERSIST, phase=Phase.WAITING)
        last = max((segment.node for segment in settled), key=lambda node: node.end)
        operation.receipts += state.residence.hold(HOST, last)
        segments: list[Segment] = []
        for segment in settled:
            pages = segment.node.values[HOST][segment.component]
            assert pages is not None
            segments.append(Segment(segment.node, segment.component, page_run(pages)))
        state.operations.add(operation)
        state.mark(operation, segments)
        state.journal.record("persist", operation.id, last.id)
        self.waiting.append(operation)
        self.begin_waiting()

    def _width(self, segment: Segment) -> int:
        return self._state.components[segment.component].pages_of(segment.node.width)

    def _keys(self, segment: Segment) -> tuple[bytes, ...]:
        keys = self._state.tree.keys(segment.node)
        if self._state.components[segment.component].per_page:
            return tuple(keys)
        return (keys[-1],)


def _sources(segment: Segment, lent: Lent | None) -> PageRun:
    node = segment.node
    if lent is not None:
        return lent[1][node.start : node.end]
    pages = node.values[DEVICE][segment.component]
    assert pages is not None
    return pages
