"""The operations in flight: how each begins, moves on and ends, whatever its kind.

The one writer of ids, phases, seats and tickets. A part of the replica says what an operation is to do,
and what follows from how it ended; everything that all operations have in common is here.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from ....coordinator.expectations import Forgotten, Queued, Seated, Settled, Unseated
from ....coordinator.operation import Kind, Outcome, Phase, Queue, require_step
from ....coordinator.seats import Seats, SeatTable
from ....coordinator.verdict import Watermark
from ...protocol.notices import Finished, Quarantined
from ...protocol.orders import (
    Cancel,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    ObjectTransfer,
    Put,
    Serve,
)
from ..core.basis import Basis
from ..tree.residence import TIERS, Residence
from .kinds import Copy, Moving, Operation, Persist, Prefetch, Serving

_AT_REST = (Phase.QUARANTINED, Phase.DONE, Phase.SERVING)
_DONE, _QUIESCE, _QUARANTINE = Phase.DONE, Queue.QUIESCE, Queue.QUARANTINE
_TO_HOST = (Kind.BACKUP, Kind.RETRACT)


class Agenda:
    """The operations in flight by id, with their seats in the ballot and tickets in the queues."""

    def __init__(self, basis: Basis, residence: Residence) -> None:
        self._timeouts = basis.config.timeouts
        self._residence = residence
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._seats = Seats(basis.config.bounds.prefetches)
        self._queues: dict[Queue, deque[tuple[int, int]]] = {queue: deque() for queue in Queue}
        """(ticket, operation) in the order in which they will settle."""
        self._next_ticket = 1
        self.in_flight: dict[int, Operation] = {}
        self.working: Counter[Kind] = Counter()
        """How many of each kind are in flight, but for what is quarantined or merely serves."""
        self.working_for_store = 0
        """How many of these are for the store."""
        self.ended = 0
        """How many operations have ended."""
        self.next_id = 1
        """The id of the next operation; ids are never used again."""

    def begin(self, operation: Operation, *facts: object) -> None:
        """Enter a new operation, which stands in the first phase of its kind, with its facts."""
        operation.id = self.next_id
        self.next_id += 1
        self.in_flight[operation.id] = operation
        if operation.phase not in _AT_REST:
            self._count(operation, 1)
        if isinstance(operation, Moving):
            operation.mark()
        self._journal.record(operation.kind.word, operation.id, *facts)

    def works(self, number: int) -> bool:
        """Say whether an operation is in flight, and neither merely serves nor is quarantined."""
        operation = self.in_flight.get(number)
        return operation is not None and operation.phase not in _AT_REST

    def copy(self, operation: Copy, transfers: Sequence[CopyTransfer], *facts: object) -> None:
        """Begin a copy and order it."""
        self.begin(operation, *facts)
        self._enqueue(operation.queue, operation)
        order = CopyToHost if operation.kind in _TO_HOST else CopyToDevice
        timeout_s = self._timeouts.copy_s
        self._outbox.orders.append(order(operation.id, tuple(transfers), timeout_s))

    def persist(
        self, operation: Persist, transfers: Sequence[ObjectTransfer], after: bytes, distance: int
    ) -> None:
        """Order a persist whose turn has come; see `Put` for what its pages continue."""
        self._advance(operation, Phase.ISSUED)
        self._enqueue(operation.queue, operation)
        timeout_s = self._timeouts.persist_s
        self._outbox.orders.append(Put(operation.id, tuple(transfers), timeout_s, after, distance))

    def serve(self, operation: Serving, transfers: Sequence[ObjectTransfer]) -> None:
        """Order that pages are served, beside those that the operation serves already."""
        self._outbox.orders.append(Serve(operation.id, tuple(transfers)))

    def vote(self, operation: Prefetch, phase: Phase, bound: int, *facts: object) -> None:
        """Let the ranks vote on a prefetch: in this phase, and on no length beyond this bound."""
        if phase is not operation.phase:
            self._enter(operation, phase)
        operation.bound = bound
        self._journal.record("vote", operation.id, phase.word, bound, *facts)
        if operation.seat is None:
            operation.seat = self._seats.take(operation.id, phase, bound)
        else:
            self._seats.change(operation.seat, phase, bound)
        self._outbox.expectations.append(Seated(operation.id, operation.seat, phase, bound))

    def seats(self) -> SeatTable:
        """Return the table of the seats of the next ballot; the same one while nothing changes."""
        return self._seats.freeze()

    @property
    def seats_taken(self) -> int:
        """How many prefetches have a seat."""
        return self._seats.taken

    def queues(self) -> dict[Queue, list[tuple[int, int]]]:
        """Return a copy of the queues: ticket and operation, in their order."""
        return {queue: list(line) for queue, line in self._queues.items()}

    def settled(self, watermark: Watermark) -> Iterator[tuple[Operation, bool]]:
        """Yield the operations that a watermark lets out of its queue, and whether each ended well.

        The first that failed is the last of them: nothing is said of those behind it.
        """
        queue, line = watermark.queue, self._queues[watermark.queue]
        while line:
            ticket, number = line[0]
            failed = ticket == watermark.first_failed
            if not failed and ticket > watermark.ended_through:
                return
            line.popleft()
            self._outbox.expectations.append(Settled(queue, ticket))
            yield self.in_flight[number], not failed
            if failed:
                return

    def stop(self, operation: Operation, outcome: Outcome) -> None:
        """Stop an operation whose I/O may still run: its pages wait in QUIESCE.

        From here on it has no part in the tree but its receipts: its own pages belong to it alone.
        """
        operation.ending = outcome
        if isinstance(operation, Moving):
            operation.unmark(self._residence.changed)
        elif self._leave_seat(operation):
            self._outbox.expectations.append(Unseated(operation.id))
        self._advance(operation, Phase.QUIESCE)
        self._outbox.orders.append(Cancel(operation.id, self._timeouts.quiesce_s))
        self._enqueue(_QUIESCE, operation)

    def stop_issued(self, queue: Queue, outcome: Outcome) -> None:
        """Stop all that stand in a queue."""
        line = self._queues[queue]
        while line:
            ticket, number = line.popleft()
            self._outbox.expectations.append(Settled(queue, ticket))
            self.stop(self.in_flight[number], outcome)

    def drop_lookup(self, operation: Prefetch, outcome: Outcome) -> None:
        """End a prefetch that only looks: that touches no pages, so nothing has to become quiet."""
        self._outbox.orders.append(Cancel(operation.id, self._timeouts.quiesce_s))
        self.finish(operation, outcome)

    def quarantine(self, operation: Operation, rank: int | None) -> None:
        """Set an operation apart that did not fall quiet in time, by what was seen on a rank."""
        self._advance(operation, Phase.QUARANTINED)
        self._enqueue(_QUARANTINE, operation)
        self._outbox.notices.append(Quarantined(operation.id, operation.kind, rank))

    def let_others_pass(self) -> None:
        """Move the first in quarantine behind the others, which may be quiet before it ever is."""
        line = self._queues[_QUARANTINE]
        if len(line) > 1:
            ticket, number = line.popleft()
            self._outbox.expectations.append(Settled(_QUARANTINE, ticket))
            self._enqueue(_QUARANTINE, self.in_flight[number])

    def release_receipts(self, operation: Operation) -> None:
        """Give back the locks and pins of an operation, and what only they kept in the tree."""
        residence, receipts = self._residence, operation.receipts
        residence.release(receipts)
        for receipt in receipts:
            residence.prune(receipt.node)
        receipts.clear()

    def finish(self, operation: Operation, outcome: Outcome | None = None) -> None:
        """End an operation: whatever it still owns and holds is given back.

        Its outcome is the one that it stopped with, if none is given.
        """
        ended = operation.ending if outcome is None else outcome
        assert ended is not None
        if isinstance(operation, Moving):
            operation.unmark(self._residence.changed)
        else:
            self._leave_seat(operation)
        self._advance(operation, _DONE)
        self.release_receipts(operation)
        if operation.owns_pages:
            for tier in TIERS:
                for index, pool in enumerate(self._residence.pools[tier]):
                    pool.give_back(operation.owned_pages(tier, index))
        del self.in_flight[operation.id]
        self.ended += 1
        self._outbox.expectations.append(Forgotten(operation.id))
        self._outbox.notices.append(Finished(operation.id, operation.kind, ended))

    def _advance(self, operation: Operation, phase: Phase) -> None:
        """Change an operation's phase, on the record."""
        self._enter(operation, phase)
        self._journal.record("phase", operation.id, phase.word)

    def _enter(self, operation: Operation, phase: Phase) -> None:
        """Change an operation's phase, if the table of transitions has that step."""
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
        ticket = self._next_ticket
        self._next_ticket += 1
        self._queues[queue].append((ticket, operation.id))
        self._outbox.expectations.append(Queued(queue, ticket, operation.id))

    def _leave_seat(self, operation: Operation) -> bool:
        """Give back the seat of a prefetch; say whether it had one."""
        if not isinstance(operation, Prefetch) or operation.seat is None:
            return False
        self._seats.give_back(operation.seat)
        operation.seat = None
        return True
