"""Verdicts: the conclusions from a folded vector, identical on every rank.

A verdict is read under the layout that was frozen when its round was launched. It carries no decision
about pages or the tree: the replica derives those from it.

A verdict names only the prefetch slots and watermark queues that changed: their lanes or the meaning of
their lanes differ from the round before. The others need no verdict, because the replica has already
applied the previous verdict (P3), and applying its content again would change nothing:

- For an unchanged prefetch slot, the previous verdict reported landed pages or nothing, and reporting
  landed pages again has no effect. After any other verdict, the replica changes the slot's
  operation, phase or bound. The replica ignores a verdict only if it has changed them before. Either
  way, the slot counts as changed. No earlier meaning returns, because phases follow TRANSITIONS and a
  bound only falls.
- For an unchanged watermark queue, the operations that its lanes settled have left the queue. The
  lanes report the first remaining operation neither as finished nor as the first failure. Operations
  queued later have higher indices than those in the lanes. Therefore the lanes settle nothing more.

A verdict also omits prefetch slots that require no action. If no rank's deadline passed, these are
lookups that some rank has not answered, and reads of which no page has landed on all ranks and none has
failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .collective import Vector
from .lanes import (
    HEADER_LANES,
    HEALTH,
    NEUTRAL,
    NEWEST,
    PROPOSAL,
    QUEUE_LANES,
    READINESS,
    REQUESTS,
    SLOT_LANES,
    SLOTS_AT,
    TIME,
    BallotShape,
    LaneLayout,
    read_header,
)
from .operation import Phase, Queue
from .prefetch_slots import COLUMNS, NOBODY, OPERATION, PrefetchSlots, PrefetchSlotTable
from .proposal import Readiness


class PrefetchFound(NamedTuple):
    """Verdict on a prefetch in QUERY or RESTORABLE: how many pages the ranks can restore.

    If `pages` equals `longest`, every rank can restore that length, and no rank can restore a longer
    length of at most `bound` pages.
    """

    operation: int
    bound: int
    """The longest length, in pages, that the ranks were allowed to vote for."""
    pages: int | None
    """The smallest of the ranks' longest restorable lengths, in pages; None while some rank has not
    answered."""
    shortest_rank: int | None
    """The lowest-numbered rank whose longest restorable length is `pages`."""
    longest: int | None
    """The largest of the ranks' longest restorable lengths, in pages; None while some rank has not
    answered."""
    expired_rank: int | None
    """A rank on which the prefetch's deadline passed, or None."""


class PrefetchArrived(NamedTuple):
    """Verdict on a prefetch in TRANSFER: its first `pages` pages hold verified bytes on every rank."""

    operation: int
    pages: int
    ceiling: int | None
    """Upper bound on the pages that can land on all ranks; None while no rank has reported a bound."""
    ceiling_rank: int | None
    """The lowest-numbered rank that reported the ceiling."""
    expired_rank: int | None
    """A rank on which the prefetch's deadline passed, or None."""


SlotVerdict = PrefetchFound | PrefetchArrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Verdict on a watermark queue: how far all ranks have finished, and the first failed operation.

    `ended_through` is the queue index up to which every operation has finished on every rank.
    `first_failed` is the lowest queue index of an operation that failed on some rank.
    """

    queue: Queue
    ended_through: int
    first_failed: int | None
    failed_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """Verdict on the proposals that ranks have staged."""

    proposal: int
    """The digest of the staged proposal; the smallest digest if ranks have staged different proposals.
    """
    differs: bool
    """Whether ranks have staged different proposals."""
    readiness: Readiness
    """The lowest readiness that a rank reported; `REFUSED` if any rank refuses."""
    refused_rank: int | None
    """The highest-numbered rank that refuses the proposal, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one round, limited to changes since the round before."""

    round: int
    time_ms: int
    """Agreed time in milliseconds: the smallest of the ranks' clocks."""
    watermarks: tuple[Watermark, ...]
    """The watermark queues that changed since the round before, in the order of `Queue`."""
    prefetch_slots: tuple[SlotVerdict, ...]
    """The prefetch slots that changed since the round before, by ascending operation id."""
    proposed: Proposed | None = None
    requests: int = 0
    """The number up to which every rank that receives control requests has all of them; 0 if no rank
    receives any."""
    newest: int = 0
    """The number of the newest control request that any rank knows of."""


def unhealthy_rank(header: Sequence[int]) -> int | None:
    """Return the highest-numbered rank that reported itself unhealthy in a folded header, or None."""
    return _marked_rank(header[HEALTH])


_SEATS_IN_BODY = SLOTS_AT - HEADER_LANES
"""The offset of the prefetch slots' lanes in a body (a vector without its header), in lanes."""

_QUEUE_BYTES = 8 * _SEATS_IN_BODY
"""The size of the watermark queues' lanes in a body, in bytes."""

_HEADER_BYTES = 8 * HEADER_LANES

_BY_OPERATION = attrgetter("operation")

_TRANSFER = int(Phase.TRANSFER)
"""The phase TRANSFER as it is encoded in a row of the table of prefetch slots."""


class Verdicts:
    """Reads the folded vectors of one epoch, each once and in order. Keeps only copies of them."""

    def __init__(self, shape: BallotShape) -> None:
        self._world_size = shape.world_size
        self._prefetch_slots: PrefetchSlotTable = PrefetchSlots(shape.prefetch_slots).freeze()
        # Start from lanes lower than any real lane, so that every lane counts as changed in the first
        # round.
        lowest = np.full(shape.length, np.iinfo(np.int64).min, dtype=np.int64)
        self._body = lowest[HEADER_LANES:].tobytes()

    def read(self, layout: LaneLayout, folded: Vector) -> Verdict:
        """Return the verdict of a round whose header shows that the ranks agree."""
        lanes = folded.tobytes()
        header, body = read_header(lanes), lanes[_HEADER_BYTES:]
        watermarks: tuple[Watermark, ...] = ()
        prefetch_slots: tuple[SlotVerdict, ...] = ()
        if body != self._body or layout.prefetch_slots is not self._prefetch_slots:
            new, before = np.frombuffer(body, np.int64), np.frombuffer(self._body, np.int64)
            if body[:_QUEUE_BYTES] != self._body[:_QUEUE_BYTES]:
                watermarks = self._read_queues(new[:_SEATS_IN_BODY], before[:_SEATS_IN_BODY])
            prefetch_slots = self._read_slots(
                new[_SEATS_IN_BODY:], before[_SEATS_IN_BODY:], layout.prefetch_slots
            )
            self._body, self._prefetch_slots = body, layout.prefetch_slots
        return Verdict(
            round=layout.round,
            time_ms=header[TIME],
            watermarks=watermarks,
            prefetch_slots=prefetch_slots,
            proposed=_read_proposed(header),
            requests=0 if header[REQUESTS] == NEUTRAL else header[REQUESTS],
            newest=-header[NEWEST],
        )

    def _read_queues(self, lanes: Vector, before: Vector) -> tuple[Watermark, ...]:
        news: list[int] = _differing(lanes, before, QUEUE_LANES).nonzero()[0].tolist()
        return tuple(self._read_queue(Queue(queue), lanes) for queue in news)

    def _read_queue(self, queue: Queue, lanes: Vector) -> Watermark:
        at = QUEUE_LANES * queue
        ended_through, failed = lanes[at : at + QUEUE_LANES].tolist()
        queue_index, rank = _named(failed, self._world_size)
        return Watermark(
            queue=queue, ended_through=ended_through, first_failed=queue_index, failed_rank=rank
        )

    def _read_slots(
        self, lanes: Vector, before: Vector, table: PrefetchSlotTable
    ) -> tuple[SlotVerdict, ...]:
        differing = _differing(lanes, before, SLOT_LANES)
        if table is not self._prefetch_slots:
            differing |= _differing(
                table.rows.reshape(-1), self._prefetch_slots.rows.reshape(-1), COLUMNS
            )
        differing &= table.rows[:, OPERATION] != NOBODY
        prefetch_slots = differing.nonzero()[0]
        if not prefetch_slots.size:
            return ()
        # Read one row at a time, because indexing with an array releases the GIL, and the engine's
        # thread would have to wait to reacquire it.
        rows: list[list[int]] = [
            table.rows[prefetch_slot].tolist() for prefetch_slot in prefetch_slots
        ]
        votes: list[list[int]] = [
            lanes[at : at + SLOT_LANES].tolist() for at in prefetch_slots * SLOT_LANES
        ]
        # In TRANSFER, a prefetch slot's first two lanes are the pages landed and the most pages that
        # can land. In QUERY and RESTORABLE, they are the smallest and the largest of the ranks' longest
        # restorable lengths. The third lane names a rank whose deadline has passed.
        verdicts = [
            self._read_slot(row, vote)
            for row, vote in zip(rows, votes, strict=True)
            if vote[0] > 0 or vote[2] or (not vote[0] and vote[1] != NEUTRAL)
        ]
        verdicts.sort(key=_BY_OPERATION)
        return tuple(verdicts)

    def _read_slot(self, row: list[int], vote: list[int]) -> SlotVerdict:
        operation, phase, bound = row
        level, limit, mark = vote
        expired_rank = _marked_rank(mark) if mark else None
        if phase == _TRANSFER:
            if limit == NEUTRAL:
                return PrefetchArrived(operation, level, None, None, expired_rank)
            return PrefetchArrived(operation, level, *divmod(limit, self._world_size), expired_rank)
        if level < 0:
            return PrefetchFound(operation, bound, None, None, None, expired_rank)
        return PrefetchFound(
            operation, bound, *divmod(level, self._world_size), -limit, expired_rank
        )


def _differing(values: Vector, before: Vector, width: int) -> npt.NDArray[np.bool_]:
    """Return, for each group of `width` consecutive values, whether any of them changed."""
    groups = np.zeros(len(values) // width, dtype=np.bool_)
    groups[(values != before).nonzero()[0] // width] = True
    return groups


def _read_proposed(lanes: Sequence[int]) -> Proposed | None:
    smallest, largest = lanes[PROPOSAL], -lanes[PROPOSAL + 1]
    if smallest == NEUTRAL:
        return None
    refused_rank = _marked_rank(lanes[READINESS])
    return Proposed(
        proposal=smallest,
        differs=smallest != largest,
        readiness=Readiness.REFUSED if refused_rank is not None else Readiness(lanes[READINESS]),
        refused_rank=refused_rank,
    )


def _named(lane: int, world_size: int) -> tuple[int, int] | tuple[None, None]:
    if lane == NEUTRAL:
        return None, None
    return divmod(lane, world_size)


def _marked_rank(lane: int) -> int | None:
    return -lane - 1 if lane < 0 else None
