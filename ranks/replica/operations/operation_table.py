"""The operation table: how operations of every kind begin, change phase and end.

Only this module assigns operation ids, phases, prefetch slots and queue indices.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from ....coordinator.expectations import Forgotten, Queued, Settled, SlotAssigned, SlotFreed
from ....coordinator.operation import OperationKind, Outcome, Phase, Queue, require_step
from ....coordinator.prefetch_slots import PrefetchSlots, PrefetchSlotTable
from ....coordinator.verdict import Watermark
from ...protocol.events import Finished, Quarantined
from ...protocol.orders import (
    Cancel,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    ObjectTransfer,
    Put,
    Serve,
)
from ..core.replica_parts import ReplicaParts
from ..tree.page_allocator import TIERS, PageAllocator
from .kinds import Copy, Moving, Operation, Persist, Prefetch, Serving

_AT_REST = (Phase.QUARANTINED, Phase.DONE, Phase.SERVING)
_DONE, _QUIESCE, _QUARANTINE = Phase.DONE, Queue.QUIESCE, Queue.QUARANTINE
_TO_HOST = (OperationKind.BACKUP, OperationKind.RETRACT)


class OperationTable:
    """Operations in flight by id, with their prefetch slots and their indices in watermark queues."""

    def __init__(self, basis: ReplicaParts, allocator: PageAllocator) -> None:
        self._timeouts = basis.config.timeouts
        self._allocator = allocator
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._prefetch_slots = PrefetchSlots(basis.config.bounds.prefetches)
        self._queues: dict[Queue, deque[tuple[int, int]]] = {queue: deque() for queue in Queue}
        """By queue: (queue index, operation id) in the order in which operations settle."""
        self._next_ticket = 1
        self.in_flight: dict[int, Operation] = {}
        self.working: Counter[OperationKind] = Counter()
        """Number of operations in flight by kind, excluding quarantined and serving ones."""
        self.working_for_store = 0
        """Number of the operations counted in `working` that read from or write to the store."""
        self.ended = 0
        self.next_id = 1
        """The id of the next operation; ids are never reused."""

    def begin(self, operation: Operation, *facts: object) -> None:
        """Add an operation in the first phase of its kind; record it with `facts` in the journal."""
        operation.id = self.next_id
        self.next_id += 1
        self.in_flight[operation.id] = operation
        if operation.phase not in _AT_REST:
            self._count(operation, 1)
        if isinstance(operation, Moving):
            operation.mark()
        self._journal.record(operation.kind.word, operation.id, *facts)

    def works(self, number: int) -> bool:
        """Return whether an operation is in flight and neither serving nor quarantined."""
        operation = self.in_flight.get(number)
        return operation is not None and operation.phase not in _AT_REST

    def copy(self, operation: Copy, transfers: Sequence[CopyTransfer], *facts: object) -> None:
        """Begin a copy, and order the executor to carry it out."""
        self.begin(operation, *facts)
        self._enqueue(operation.queue, operation)
        order = CopyToHost if operation.kind in _TO_HOST else CopyToDevice
        timeout_s = self._timeouts.copy_s
        self._outbox.orders.append(order(operation.id, tuple(transfers), timeout_s))

    def persist(
        self, operation: Persist, transfers: Sequence[ObjectTransfer], after: bytes, distance: int
    ) -> None:
        """Order the write of a waiting persist; see `Put` for the meaning of `after` and `distance`."""
        self._advance(operation, Phase.ISSUED)
        self._enqueue(operation.queue, operation)
        timeout_s = self._timeouts.persist_s
        self._outbox.orders.append(Put(operation.id, tuple(transfers), timeout_s, after, distance))

    def serve(self, operation: Serving, transfers: Sequence[ObjectTransfer]) -> None:
        """Order the executor to let other groups read more pages that a serving operation pins."""
        self._outbox.orders.append(Serve(operation.id, tuple(transfers)))

    def vote(self, operation: Prefetch, phase: Phase, bound: int, *facts: object) -> None:
        """Put a prefetch into a phase in which the ranks vote on it, with lengths of at most `bound`.

        Takes a prefetch slot in the ballot if the operation has none.
        """
        if phase is not operation.phase:
            self._enter(operation, phase)
        operation.bound = bound
        self._journal.record("vote", operation.id, phase.word, bound, *facts)
        if operation.prefetch_slot is None:
            operation.prefetch_slot = self._prefetch_slots.take(operation.id, phase, bound)
        else:
            self._prefetch_slots.change(operation.prefetch_slot, phase, bound)
        self._outbox.expectations.append(
            SlotAssigned(operation.id, operation.prefetch_slot, phase, bound)
        )

    def prefetch_slots(self) -> PrefetchSlotTable:
        """Return the prefetch slots of the next ballot; the same object while nothing changes."""
        return self._prefetch_slots.freeze()

    @property
    def prefetch_slots_taken(self) -> int:
        """How many prefetches have a prefetch slot."""
        return self._prefetch_slots.taken

    def queues(self) -> dict[Queue, list[tuple[int, int]]]:
        """Return a copy of the queues: (queue index, operation id) in ascending order."""
        return {queue: list(line) for queue, line in self._queues.items()}

    def settled(self, watermark: Watermark) -> Iterator[tuple[Operation, bool]]:
        """Remove the operations that a watermark settles; yield (operation, whether it succeeded).

        Stops after the first failed operation, because the watermark does not cover later ones.
        """
        queue, line = watermark.queue, self._queues[watermark.queue]
        while line:
            queue_index, number = line[0]
            failed = queue_index == watermark.first_failed
            if not failed and queue_index > watermark.ended_through:
                return
            line.popleft()
            self._outbox.expectations.append(Settled(queue, queue_index))
            yield self.in_flight[number], not failed
            if failed:
                return

    def stop(self, operation: Operation, outcome: Outcome) -> None:
        """Stop an operation whose I/O may still run; it keeps its pages in QUIESCE until the I/O ends.

        Afterwards the operation refers to the tree only by its lock handles.
        """
        operation.ending = outcome
        if isinstance(operation, Moving):
            operation.unmark(self._allocator.changed)
        elif self._leave_slot(operation):
            self._outbox.expectations.append(SlotFreed(operation.id))
        self._advance(operation, Phase.QUIESCE)
        self._outbox.orders.append(Cancel(operation.id, self._timeouts.quiesce_s))
        self._enqueue(_QUIESCE, operation)

    def stop_issued(self, queue: Queue, outcome: Outcome) -> None:
        """Stop all operations in a watermark queue: those whose I/O has been ordered."""
        line = self._queues[queue]
        while line:
            queue_index, number = line.popleft()
            self._outbox.expectations.append(Settled(queue, queue_index))
            self.stop(self.in_flight[number], outcome)

    def drop_lookup(self, operation: Prefetch, outcome: Outcome) -> None:
        """End at once a prefetch whose lookup is running, because a lookup touches no pages."""
        self._outbox.orders.append(Cancel(operation.id, self._timeouts.quiesce_s))
        self.finish(operation, outcome)

    def quarantine(self, operation: Operation, rank: int | None) -> None:
        """Quarantine an operation whose I/O did not end in time, as reported by `rank`."""
        self._advance(operation, Phase.QUARANTINED)
        self._enqueue(_QUARANTINE, operation)
        self._outbox.events.append(Quarantined(operation.id, operation.kind, rank))

    def requeue_behind_others(self) -> None:
        """Requeue the first quarantined operation as the last one, so that others can end first."""
        line = self._queues[_QUARANTINE]
        if len(line) > 1:
            queue_index, number = line.popleft()
            self._outbox.expectations.append(Settled(_QUARANTINE, queue_index))
            self._enqueue(_QUARANTINE, self.in_flight[number])

    def release_locks(self, operation: Operation) -> None:
        """Release an operation's locks and pins, and remove the tree nodes that only they kept."""
        allocator, lock_handles = self._allocator, operation.lock_handles
        allocator.release(lock_handles)
        for lock_handle in lock_handles:
            allocator.prune(lock_handle.node)
        lock_handles.clear()

    def finish(self, operation: Operation, outcome: Outcome | None = None) -> None:
        """End an operation: free its pages and release its locks and pins.

        The default of `outcome` is the outcome with which the operation was stopped.
        """
        ended = operation.ending if outcome is None else outcome
        assert ended is not None
        if isinstance(operation, Moving):
            operation.unmark(self._allocator.changed)
        else:
            self._leave_slot(operation)
        self._advance(operation, _DONE)
        self.release_locks(operation)
        if operation.owns_pages:
            for tier in TIERS:
                for index, pool in enumerate(self._allocator.pools[tier]):
                    pool.give_back(operation.owned_pages(tier, index))
        del self.in_flight[operation.id]
        self.ended += 1
        self._outbox.expectations.append(Forgotten(operation.id))
        self._outbox.events.append(Finished(operation.id, operation.kind, ended))

    def _advance(self, operation: Operation, phase: Phase) -> None:
        self._enter(operation, phase)
        self._journal.record("phase", operation.id, phase.word)

    def _enter(self, operation: Operation, phase: Phase) -> None:
        """Change an operation's phase; raise an error unless the table of transitions allows it."""
        kind, before = operation.kind, operation.phase
        require_step(operation.id, kind, before, phase)
        if (phase in _AT_REST) != (before in _AT_REST):
            self._count(operation, -1 if phase in _AT_REST else 1)
        operation.phase = phase

    def _count(self, operation: Operation, change: int) -> None:
        self.working[operation.kind] += change
        if operation.is_for_store:
            self.working_for_store += change

    def _enqueue(self, queue: Queue, operation: Operation) -> None:
        queue_index = self._next_ticket
        self._next_ticket += 1
        self._queues[queue].append((queue_index, operation.id))
        self._outbox.expectations.append(Queued(queue, queue_index, operation.id))

    def _leave_slot(self, operation: Operation) -> bool:
        if not isinstance(operation, Prefetch) or operation.prefetch_slot is None:
            return False
        self._prefetch_slots.give_back(operation.prefetch_slot)
        operation.prefetch_slot = None
        return True
