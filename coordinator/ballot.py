"""What one rank has seen so far of the operations in flight.

The executor reports `Progress`; the ballot keeps the level that each operation has reached. Levels
only rise (rule R13): noting the same thing twice, or in another order, changes nothing. Progress of
an operation that the ballot does not expect is ignored, so that a report that arrives after the
operation has ended leaves nothing behind.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from .operation import Queue

UNBOUNDED = 1 << 40
"""A ceiling that no page count reaches: this rank knows of nothing that stops the transfer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The lengths that this rank can restore with what its store has, in pages of the lookup.

    Every length up to `pages`, and those in `beyond`, ascending. State that exists at some positions
    only (a window, a recurrent state) makes the set sparse; ranks agree on one that all have, which
    the smallest of their longest need not be (rule R4).
    """

    operation: int
    pages: int
    beyond: tuple[int, ...] = ()

    def longest(self, bound: int) -> int:
        """Return the longest of the lengths that is not more than `bound`; 0 if there is none."""
        count = bisect_right(self.beyond, bound)
        return self.beyond[count - 1] if count else min(self.pages, bound)


@dataclass(frozen=True, slots=True)
class Landed:
    """The first `pages` pages hold verified bytes on this rank. Cumulative."""

    operation: int
    pages: int


@dataclass(frozen=True, slots=True)
class Capped:
    """No more than the first `pages` pages can land on this rank."""

    operation: int
    pages: int


@dataclass(frozen=True, slots=True)
class Expired:
    """The operation's deadline has passed on this rank."""

    operation: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A copy or write is over on this rank: done, or failed."""

    operation: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Nothing on this rank touches the operation's pages any more."""

    operation: int


@dataclass(frozen=True, slots=True)
class QuiesceExpired:
    """Quiet did not come within its deadline on this rank."""

    operation: int


Progress = Answered | Landed | Capped | Expired | Ended | Quiesced | QuiesceExpired


@dataclass(slots=True)
class Sightings:
    """What this rank has seen of one operation."""

    answered: Answered | None = None
    landed: int = 0
    ceiling: int = UNBOUNDED
    expired: bool = False
    ended: bool | None = None
    """None while it runs, then whether it went well."""
    quiesced: bool = False
    quiesce_expired: bool = False


@dataclass(slots=True)
class _QueueSightings:
    """One watermark: tickets in order, and how far this rank has seen them end."""

    waiting: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """(ticket, operation) of those that this rank has not seen end, or that end after such a one."""
    ended_through: int = 0


class Ballot:
    """The levels that this rank will vote with. Not thread-safe; one owner."""

    def __init__(self) -> None:
        self._sightings: dict[int, Sightings] = {}
        self._queues = {queue: _QueueSightings() for queue in Queue}

    def expect(self, operation: int) -> None:
        """Begin to note progress of `operation`; does nothing if it is expected already."""
        self._sightings.setdefault(operation, Sightings())

    def enqueue(self, queue: Queue, ticket: int, operation: int) -> None:
        """Put `operation` behind the others of `queue`; tickets of a queue only rise."""
        self.expect(operation)
        self._queues[queue].waiting.append((ticket, operation))

    def settle(self, queue: Queue, ticket: int) -> None:
        """Drop the tickets of `queue` up to `ticket`: every rank has the same outcome for them."""
        line = self._queues[queue]
        while line.waiting and line.waiting[0][0] <= ticket:
            line.waiting.popleft()
        line.ended_through = max(line.ended_through, ticket)

    def forget(self, operation: int) -> None:
        """Drop what was seen of `operation`, which has ended on every rank."""
        self._sightings.pop(operation, None)

    def note(self, progress: Progress) -> None:
        """Raise the level that `progress` speaks of. Unexpected operations are ignored."""
        seen = self._sightings.get(progress.operation)
        if seen is None:
            return
        match progress:
            case Answered():
                if seen.answered is None:
                    seen.answered = progress
            case Landed(pages=pages):
                seen.landed = max(seen.landed, pages)
            case Capped(pages=pages):
                seen.ceiling = min(seen.ceiling, pages)
            case Expired():
                seen.expired = True
            case Ended(ok=ok):
                if seen.ended is None:
                    seen.ended = ok
            case Quiesced():
                seen.quiesced = True
            case QuiesceExpired():
                seen.quiesce_expired = True

    def sightings(self, operation: int) -> Sightings:
        """Return what was seen of `operation`; nothing yet if it is not expected."""
        return self._sightings.get(operation, _NOTHING)

    def watermark(self, queue: Queue) -> tuple[int, int | None]:
        """Return the ticket up to which all have ended here, and the first failed one beyond it."""
        line = self._queues[queue]
        while line.waiting:
            ticket, operation = line.waiting[0]
            if not self._well(queue, operation):
                break
            line.ended_through = ticket
            line.waiting.popleft()
        for ticket, operation in line.waiting:
            if self._failed(queue, operation):
                return line.ended_through, ticket
        return line.ended_through, None

    def _well(self, queue: Queue, operation: int) -> bool:
        seen = self._sightings.get(operation)
        if seen is None:
            return True
        if queue in (Queue.QUIESCE, Queue.QUARANTINE):
            return seen.quiesced
        return seen.ended is True

    def _failed(self, queue: Queue, operation: int) -> bool:
        seen = self._sightings.get(operation)
        if seen is None:
            return False
        if queue is Queue.QUIESCE:
            return seen.quiesce_expired and not seen.quiesced
        return queue is not Queue.QUARANTINE and seen.ended is False


_NOTHING = Sightings()
