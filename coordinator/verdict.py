"""Verdicts: what all ranks conclude from a folded vector, the same on every rank.

A verdict is read under the layout that was frozen when its round was launched. It carries no
decision about pages or the tree: those follow from it in the replica.

It names only what is new: the seats and queues whose lanes, or whose meaning, are not those of the
round before. That loses nothing, since the replica has applied the verdict before by the time a round
is launched (P3), and applying the same again would change nothing:

- A seat. Either the verdict before was ignored or has moved its operation on, so that the seat has
  another meaning by the launch: the operation has left it, or stands in another phase or under another
  bound, and never comes back to those it had (TRANSITIONS; a bound only falls). Or it has changed
  nothing but how much has landed, which is a level.
- A queue. Its tickets leave from the front, and what the lanes before let go has left it. What stands
  in front now had not ended by them, and was not the first that failed; what came later has a higher
  ticket than any that they speak of.

Nor does it name a seat from which nothing follows. While no rank saw a deadline pass, that is a lookup
which some rank has not answered, and a transfer of which nothing has landed everywhere and of which
everything may yet land.
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
    SEAT_LANES,
    SEATS_AT,
    TIME,
    BallotShape,
    LaneLayout,
    read_header,
)
from .operation import Phase, Queue
from .proposal import Readiness
from .seats import COLUMNS, NOBODY, OPERATION, Seats, SeatTable


class Found(NamedTuple):
    """A prefetch in QUERY or RESTORABLE: how far the ranks can restore it, up to a bound.

    Where `pages` and `longest` are equal, every rank can restore that length, and none that is
    longer and within the bound is common to all.
    """

    operation: int
    bound: int
    """The longest length that the ranks were asked for."""
    pages: int | None
    """The smallest of the ranks' longest lengths; None while some rank has not answered."""
    shortest_rank: int | None
    """The lowest rank that could restore no more than `pages`."""
    longest: int | None
    """The largest of the ranks' longest lengths; None like `pages`."""
    expired_rank: int | None
    """A rank that saw the deadline pass, or None."""


class Arrived(NamedTuple):
    """A prefetch in TRANSFER: its first `pages` pages hold verified bytes on every rank."""

    operation: int
    pages: int
    ceiling: int | None
    """No rank will ever see more than these land; None while no rank knows of a limit."""
    ceiling_rank: int | None
    """The lowest rank that set the ceiling."""
    expired_rank: int | None
    """A rank that saw the deadline pass, or None."""


SeatVerdict = Found | Arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """A queue: every operation up to this ticket has ended well on every rank, but the first failed."""

    queue: Queue
    ended_through: int
    first_failed: int | None
    failed_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """The proposal that ranks have staged, if any of them has staged one."""

    proposal: int
    """The digest of the proposal; the smallest where ranks have staged several."""
    differs: bool
    """Some ranks have staged one proposal, and some another."""
    readiness: Readiness
    """How far the last of the ranks is with it."""
    refused_rank: int | None
    """The highest rank that cannot do it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one round, as far as it is news."""

    round: int
    time_ms: int
    """Agreed time: the smallest of the ranks' clocks."""
    watermarks: tuple[Watermark, ...]
    """In the order of `Queue`."""
    seats: tuple[SeatVerdict, ...]
    """In the order of operations."""
    proposed: Proposed | None = None
    requests: int = 0
    """How many requests in a row every rank that takes some has; 0 where none does."""
    newest: int = 0
    """How many requests there are, as far as any rank knows."""


def unhealthy_rank(header: Sequence[int]) -> int | None:
    """Return the highest rank that said in the folded header that it cannot go on, or None."""
    return _marked_rank(header[HEALTH])


_SEATS_IN_BODY = SEATS_AT - HEADER_LANES
"""Where the seats begin in a body, which is a vector without its header."""

_QUEUE_BYTES = 8 * _SEATS_IN_BODY
"""How many bytes of a body belong to the queues."""

_HEADER_BYTES = 8 * HEADER_LANES

_BY_OPERATION = attrgetter("operation")

_TRANSFER = int(Phase.TRANSFER)
"""The phase as it stands in a row of the table of seats."""


class Verdicts:
    """Reads the rounds of one epoch, each once, in their order. Keeps no view of a vector."""

    def __init__(self, shape: BallotShape) -> None:
        self._world_size = shape.world_size
        self._seats: SeatTable = Seats(shape.seats).freeze()
        # No lane is ever so low, so the first round is all news.
        lowest = np.full(shape.length, np.iinfo(np.int64).min, dtype=np.int64)
        self._body = lowest[HEADER_LANES:].tobytes()

    def read(self, layout: LaneLayout, folded: Vector) -> Verdict:
        """Return the verdict of a round whose header agreed."""
        lanes = folded.tobytes()
        header, body = read_header(lanes), lanes[_HEADER_BYTES:]
        watermarks: tuple[Watermark, ...] = ()
        seats: tuple[SeatVerdict, ...] = ()
        if body != self._body or layout.seats is not self._seats:
            new, before = np.frombuffer(body, np.int64), np.frombuffer(self._body, np.int64)
            if body[:_QUEUE_BYTES] != self._body[:_QUEUE_BYTES]:
                watermarks = self._read_queues(new[:_SEATS_IN_BODY], before[:_SEATS_IN_BODY])
            seats = self._read_seats(new[_SEATS_IN_BODY:], before[_SEATS_IN_BODY:], layout.seats)
            self._body, self._seats = body, layout.seats
        return Verdict(
            round=layout.round,
            time_ms=header[TIME],
            watermarks=watermarks,
            seats=seats,
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
        ticket, rank = _named(failed, self._world_size)
        return Watermark(
            queue=queue, ended_through=ended_through, first_failed=ticket, failed_rank=rank
        )

    def _read_seats(
        self, lanes: Vector, before: Vector, table: SeatTable
    ) -> tuple[SeatVerdict, ...]:
        differing = _differing(lanes, before, SEAT_LANES)
        if table is not self._seats:
            differing |= _differing(table.rows.reshape(-1), self._seats.rows.reshape(-1), COLUMNS)
        differing &= table.rows[:, OPERATION] != NOBODY
        seats = differing.nonzero()[0]
        if not seats.size:
            return ()
        # One row at a time, since an array of rows is made while other threads run, and the engine's
        # would have to wait until they let it go on.
        rows: list[list[int]] = [table.rows[seat].tolist() for seat in seats]
        votes: list[list[int]] = [lanes[at : at + SEAT_LANES].tolist() for at in seats * SEAT_LANES]
        # In this order the lanes are how far it has come, what is known of its end, and a deadline.
        verdicts = [
            self._read_seat(row, vote)
            for row, vote in zip(rows, votes, strict=True)
            if vote[0] > 0 or vote[2] or (not vote[0] and vote[1] != NEUTRAL)
        ]
        verdicts.sort(key=_BY_OPERATION)
        return tuple(verdicts)

    def _read_seat(self, row: list[int], vote: list[int]) -> SeatVerdict:
        operation, phase, bound = row
        level, limit, mark = vote
        expired_rank = _marked_rank(mark) if mark else None
        if phase == _TRANSFER:
            if limit == NEUTRAL:
                return Arrived(operation, level, None, None, expired_rank)
            return Arrived(operation, level, *divmod(limit, self._world_size), expired_rank)
        if level < 0:
            return Found(operation, bound, None, None, None, expired_rank)
        return Found(operation, bound, *divmod(level, self._world_size), -limit, expired_rank)


def _differing(values: Vector, before: Vector, width: int) -> npt.NDArray[np.bool_]:
    """Say of each group of `width` values whether they are others than before."""
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
