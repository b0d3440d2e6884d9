"""The ballot (vote) of one rank: its progress on every operation in flight, encoded as lanes.

The executor sends progress reports (`Progress`). The ballot merges each report into the progress of its
operation. Progress only advances (rule R13), so duplicate or reordered reports change nothing. The
ballot ignores reports on operations that it does not track, such as finished ones.

Between rounds, the ballot rewrites only the lanes whose progress or meaning changed. The resulting
vector always equals one that is computed from scratch: when an operation gets a prefetch slot, the
slot's lanes are written from all progress received so far.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from ..errors import InternalError
from .codec import Record
from .collective import Vector
from .expectations import Expectation, Forgotten, Queued, Settled, SlotAssigned, SlotFreed
from .lanes import (
    NEUTRAL,
    NO_ANSWER,
    QUEUE_LANES,
    QUEUES_AT,
    SLOT_LANES,
    SLOTS_AT,
    BallotShape,
    LaneLayout,
    Voter,
    write_header,
)
from .operation import Phase, Queue
from .prefetch_slots import UNBOUNDED


class Answered(Record, frozen=True):
    """Progress report: the prefix lengths that this rank can restore from its store for a prefetch.

    Lengths are in pages. The restorable lengths are 0 to `pages`, and those listed in `beyond`
    (ascending). State that exists only at some positions (window or recurrent state) leaves gaps
    between the restorable lengths. The ranks must agree on a length that every rank can restore. The
    minimum of the ranks' longest lengths may not be restorable on every rank (rule R4).
    """

    operation: int
    pages: int
    beyond: tuple[int, ...] = ()

    def longest(self, bound: int) -> int:
        """Return this rank's longest restorable length of at most `bound` pages; 0 if there is none."""
        count = bisect_right(self.beyond, bound)
        return self.beyond[count - 1] if count else min(self.pages, bound)


class Landed(Record, frozen=True):
    """Progress report: this rank has read and verified the first `pages` pages of a prefetch."""

    operation: int
    pages: int


class Capped(Record, frozen=True):
    """Progress report: a read failed, so this rank can read only the prefetch's first `pages` pages."""

    operation: int
    pages: int


class Expired(Record, frozen=True):
    """Progress report: the operation's deadline has passed on this rank."""

    operation: int


class TransferEnded(Record, frozen=True):
    """Progress report: the operation's copy or write finished on this rank; `ok` if it succeeded."""

    operation: int
    ok: bool


class Quiesced(Record, frozen=True):
    """Progress report: this rank has no I/O in flight on the operation's pages."""

    operation: int


class QuiesceExpired(Record, frozen=True):
    """Progress report: this rank still had I/O on the operation's pages at the quiesce deadline."""

    operation: int


Progress = Answered | Landed | Capped | Expired | TransferEnded | Quiesced | QuiesceExpired


@dataclass(slots=True)
class OperationProgress:
    """The progress of one operation on this rank."""

    answered: Answered | None = None
    landed: int = 0
    ceiling: int = UNBOUNDED
    expired: bool = False
    ended: bool | None = None
    """Whether the operation's copy or write succeeded; None while it is running."""
    quiesced: bool = False
    quiesce_expired: bool = False

    def raise_to(self, progress: Progress) -> bool:
        """Merge a progress report into this progress; return whether anything changed."""
        match progress:
            case Landed(pages=pages) if pages > self.landed:
                self.landed = pages
            case TransferEnded(ok=ok) if self.ended is None:
                self.ended = ok
            case Answered() if self.answered is None:
                self.answered = progress
            case Capped(pages=pages) if pages < self.ceiling:
                self.ceiling = pages
            case Expired() if not self.expired:
                self.expired = True
            case Quiesced() if not self.quiesced:
                self.quiesced = True
            case QuiesceExpired() if not self.quiesce_expired:
                self.quiesce_expired = True
            case _:
                return False
        return True

    def ended_in(self, queue: Queue) -> bool:
        """Return whether the operation counts as finished on this rank in watermark queue `queue`."""
        if queue in _QUIET_QUEUES:
            return self.quiesced
        return self.ended is True

    def failed_in(self, queue: Queue) -> bool:
        """Return whether the operation counts as failed on this rank in watermark queue `queue`."""
        if queue is _QUIESCE:
            return self.quiesce_expired and not self.quiesced
        return queue is not _QUARANTINE and self.ended is False


_TRANSFER, _QUIESCE, _QUARANTINE = Phase.TRANSFER, Queue.QUIESCE, Queue.QUARANTINE
_QUIET_QUEUES = (_QUIESCE, _QUARANTINE)

_FAILURES = (TransferEnded, QuiesceExpired)


@dataclass(slots=True)
class _QueueIndexes:
    """The operations of one watermark queue, and the index up to which this rank has finished."""

    waiting: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """The operations after this rank's watermark, as (queue index, operation id) pairs in ascending
    order."""
    failed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Heap of (queue index, operation id) pairs of operations that failed on this rank. Pairs that no
    longer count as failures are dropped when the watermark is computed."""
    ended_through: int = 0


@dataclass(slots=True)
class _Expected:
    """A tracked operation: its progress, and its prefetch slot or watermark queue, if any."""

    seen: OperationProgress = field(default_factory=OperationProgress)
    prefetch_slot: int | None = None
    phase: Phase = Phase.WAITING
    """The operation's phase. Phase and bound determine what the lanes of the prefetch slot mean."""
    bound: int = UNBOUNDED
    queue: Queue | None = None
    """The watermark queue that the operation joined last; None if it has joined none."""
    queue_index: int = 0


class Ballot:
    """Collects one rank's progress and encodes it as the lanes of its vote. Not thread-safe.

    An operation has at most one prefetch slot and is in at most one watermark queue: the one that it
    joined last.
    """

    def __init__(self, shape: BallotShape, rank: int) -> None:
        self._prefetch_slots = shape.prefetch_slots
        self._world_size = shape.world_size
        self._rank = rank
        self._expected: dict[int, _Expected] = {}
        self._tickets = {queue: _QueueIndexes() for queue in Queue}
        self._stale = set(Queue)
        """Watermark queues that changed since their lanes were last written."""
        self._lanes: Vector = np.full(shape.length, NEUTRAL, dtype=np.int64)
        """The lanes of this rank's next vote, except for the header."""
        self._written = self._lanes.data
        """A memoryview of `_lanes`; writing a single lane through it is faster than through the array.
        """

    def follow(self, expectations: Iterable[Expectation]) -> None:
        """Apply the replica's expectations in order; they determine which operations are tracked."""
        for each in expectations:
            match each:
                case SlotAssigned():
                    self.assign_slot(each.operation, each.prefetch_slot, each.phase, each.bound)
                case SlotFreed():
                    self.free_slot(each.operation)
                case Queued():
                    self.enqueue(each.queue, each.queue_index, each.operation)
                case Settled():
                    self.dequeue(each.queue, each.queue_index)
                case Forgotten():
                    self.forget(each.operation)

    def assign_slot(
        self, operation: int, prefetch_slot: int, phase: Phase, bound: int = UNBOUNDED
    ) -> None:
        """Assign a prefetch slot to `operation`; `phase` and `bound` determine what its lanes mean."""
        if not 0 <= prefetch_slot < self._prefetch_slots:
            raise InternalError(
                f"prefetch slot is {prefetch_slot}, must be 0 to {self._prefetch_slots - 1}"
            )
        if phase not in _VOTED:
            raise InternalError(f"an operation in phase {phase.name} has no prefetch slot")
        expected = self._expect(operation)
        expected.prefetch_slot, expected.phase, expected.bound = prefetch_slot, phase, bound
        self._write_slot(prefetch_slot, expected)

    def free_slot(self, operation: int) -> None:
        """Free the operation's prefetch slot, if it has one, and set the slot's lanes to `NEUTRAL`."""
        expected = self._expected.get(operation)
        if expected is not None:
            self._free_slot(expected)

    def enqueue(self, queue: Queue, queue_index: int, operation: int) -> None:
        """Append `operation` to a watermark queue. Queue indices must be ascending."""
        expected = self._expect(operation)
        queue_indexes = self._tickets[queue]
        queue_indexes.waiting.append((queue_index, operation))
        expected.queue, expected.queue_index = queue, queue_index
        if expected.seen.failed_in(queue):
            heappush(queue_indexes.failed, (queue_index, operation))
        self._stale.add(queue)

    def dequeue(self, queue: Queue, queue_index: int) -> None:
        """Remove the settled operations of `queue`: those up to `queue_index`."""
        queue_indexes = self._tickets[queue]
        while queue_indexes.waiting and queue_indexes.waiting[0][0] <= queue_index:
            queue_indexes.waiting.popleft()
        queue_indexes.ended_through = max(queue_indexes.ended_through, queue_index)
        self._stale.add(queue)

    def forget(self, operation: int) -> None:
        """Drop the progress of `operation`, which has finished on every rank."""
        expected = self._expected.pop(operation, None)
        if expected is None:
            return
        self._free_slot(expected)
        if expected.queue is not None:
            self._stale.add(expected.queue)

    def note(self, progress: Progress) -> None:
        """Merge a progress report; ignore it if the ballot does not track its operation."""
        expected = self._expected.get(progress.operation)
        if expected is None or not expected.seen.raise_to(progress):
            return
        if expected.prefetch_slot is not None:
            self._write_slot(expected.prefetch_slot, expected)
        queue = expected.queue
        if queue is not None:
            if isinstance(progress, _FAILURES) and expected.seen.failed_in(queue):
                heappush(self._tickets[queue].failed, (expected.queue_index, progress.operation))
            self._stale.add(queue)

    def progress_of(self, operation: int) -> OperationProgress:
        """Return the progress of `operation`; empty progress if the ballot does not track it."""
        expected = self._expected.get(operation)
        return _NOTHING if expected is None else expected.seen

    def watermark(self, queue: Queue) -> tuple[int, int | None]:
        """Return (watermark, first failed): two indices in `queue`, for this rank.

        All operations up to the watermark have finished on this rank. The second index is that of the
        first failed operation after the watermark; None if none failed. The cost is proportional to the
        operations that finished or failed since the last call.
        """
        queue_indexes = self._tickets[queue]
        while queue_indexes.waiting and self._has_ended(queue, queue_indexes.waiting[0][1]):
            queue_indexes.ended_through, _ = queue_indexes.waiting.popleft()
        while queue_indexes.failed:
            queue_index, operation = queue_indexes.failed[0]
            if queue_index > queue_indexes.ended_through and self.progress_of(operation).failed_in(
                queue
            ):
                return queue_indexes.ended_through, queue_index
            heappop(queue_indexes.failed)
        return queue_indexes.ended_through, None

    def fill(self, layout: LaneLayout, voter: Voter) -> Vector:
        """Return this rank's vector for a round, as a new array that the caller owns."""
        if self._stale:
            for queue in self._stale:
                self._write_queue(queue)
            self._stale.clear()
        lanes: Vector = self._lanes.copy()
        write_header(lanes, layout, voter, self._rank)
        return lanes

    def _expect(self, operation: int) -> _Expected:
        expected = self._expected.get(operation)
        if expected is None:
            expected = self._expected[operation] = _Expected()
        return expected

    def _has_ended(self, queue: Queue, operation: int) -> bool:
        expected = self._expected.get(operation)
        return expected is None or expected.seen.ended_in(queue)

    def _write_queue(self, queue: Queue) -> None:
        ended_through, first_failed = self.watermark(queue)
        at = QUEUES_AT + QUEUE_LANES * queue
        self._lanes[at] = ended_through
        self._lanes[at + 1] = NEUTRAL if first_failed is None else self._named(first_failed)

    def _write_slot(self, prefetch_slot: int, expected: _Expected) -> None:
        lanes, at, seen = self._written, SLOTS_AT + SLOT_LANES * prefetch_slot, expected.seen
        if expected.phase is _TRANSFER:
            lanes[at] = seen.landed
            lanes[at + 1] = NEUTRAL if seen.ceiling == UNBOUNDED else self._named(seen.ceiling)
        elif seen.answered is None:
            lanes[at] = NO_ANSWER
            lanes[at + 1] = NEUTRAL
        else:
            longest = seen.answered.longest(expected.bound)
            lanes[at] = self._named(longest)
            lanes[at + 1] = -longest
        lanes[at + 2] = -(self._rank + 1) if seen.expired else 0

    def _free_slot(self, expected: _Expected) -> None:
        if expected.prefetch_slot is not None:
            lanes, at = self._written, SLOTS_AT + SLOT_LANES * expected.prefetch_slot
            lanes[at] = lanes[at + 1] = lanes[at + 2] = NEUTRAL
            expected.prefetch_slot = None

    def _named(self, value: int) -> int:
        """Encode the value of a named lane: `value` combined with this rank's number (see `lanes`)."""
        return value * self._world_size + self._rank


_VOTED = (Phase.QUERY, Phase.RESTORABLE, _TRANSFER)

_NOTHING = OperationProgress()
