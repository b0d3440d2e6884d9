"""Verdicts: what all ranks conclude from a folded vector, the same on every rank.

A verdict is read under the layout that was frozen when its round was launched. It carries no
decision about pages or the tree: those follow from it in the replica.
"""

from dataclasses import dataclass

from .collectives.base import Vector
from .lanes import (
    HEALTH,
    NEUTRAL,
    PROPOSAL,
    QUEUE_LANES,
    QUEUES_AT,
    READINESS,
    SLOT_LANES,
    SLOTS_AT,
    TIME,
    BallotShape,
    Layout,
    Slot,
)
from .operation import Phase, Queue
from .proposal import Readiness


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A prefetch in QUERY or RESTORABLE: how far the ranks can restore it, up to a bound.

    Where `pages` and `longest` are equal, every rank can restore that length, and none that is
    longer and within the bound is common to all.
    """

    operation: int
    bound: int
    """What the ranks were asked for at most."""
    pages: int | None
    """The smallest of the ranks' longest lengths; None while some rank has not answered."""
    shortest_rank: int | None
    """The lowest rank that could restore no more than `pages`."""
    longest: int | None
    """The largest of the ranks' longest lengths; None like `pages`."""
    expired_rank: int | None
    """A rank that saw the deadline pass, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A prefetch in TRANSFER: its first `pages` pages hold verified bytes on every rank."""

    operation: int
    pages: int
    ceiling: int | None
    """No rank will ever see more than these land; None while no rank knows of a limit."""
    ceiling_rank: int | None
    """The lowest rank that set the ceiling."""
    expired_rank: int | None
    """A rank that saw the deadline pass, or None."""


SlotVerdict = Found | Arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """A queue: every operation up to this ticket has ended well on every rank, but the first failed."""

    ended_through: int
    first_failed: int | None
    failed_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What the ranks have staged, if any of them has staged something."""

    proposal: int
    """Its digest; the smallest where there are several."""
    differs: bool
    """Some ranks have staged one proposal, and some another."""
    readiness: Readiness
    """How far the last of the ranks is with it."""
    refused_rank: int | None
    """The highest rank that cannot do it, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one round."""

    round: int
    time_ms: int
    """Agreed time: the smallest of the ranks' clocks."""
    watermarks: tuple[Watermark, ...]
    """By `Queue`."""
    slots: tuple[SlotVerdict, ...]
    proposed: Proposed | None = None


def unhealthy_rank(folded: Vector) -> int | None:
    """Return the highest rank that said that it cannot go on, or None."""
    return _marked_rank(int(folded[HEALTH]))


def read(shape: BallotShape, layout: Layout, folded: Vector) -> Verdict:
    """Return the verdict of a round whose header agreed."""
    lanes: list[int] = folded.tolist()
    watermarks: list[Watermark] = []
    for queue in Queue:
        at = QUEUES_AT + QUEUE_LANES * queue
        ticket, rank = _named(lanes[at + 1], shape.world_size)
        watermarks.append(Watermark(ended_through=lanes[at], first_failed=ticket, failed_rank=rank))
    slots: list[SlotVerdict] = []
    at = SLOTS_AT
    for slot in layout.slots:
        slots.append(_read_slot(slot, lanes[at : at + SLOT_LANES], shape.world_size))
        at += SLOT_LANES
    return Verdict(
        round=layout.round,
        time_ms=lanes[TIME],
        watermarks=tuple(watermarks),
        slots=tuple(slots),
        proposed=_read_proposed(lanes),
    )


def _read_proposed(lanes: list[int]) -> Proposed | None:
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


def _read_slot(slot: Slot, lanes: list[int], world_size: int) -> SlotVerdict:
    expired_rank = _marked_rank(lanes[2])
    if slot.phase in (Phase.QUERY, Phase.RESTORABLE):
        pages, rank = (None, None) if lanes[0] < 0 else _named(lanes[0], world_size)
        return Found(
            operation=slot.operation,
            bound=slot.bound,
            pages=pages,
            shortest_rank=rank,
            longest=None if pages is None else -lanes[1],
            expired_rank=expired_rank,
        )
    ceiling, rank = _named(lanes[1], world_size)
    return Arrived(
        operation=slot.operation,
        pages=lanes[0],
        ceiling=ceiling,
        ceiling_rank=rank,
        expired_rank=expired_rank,
    )


def _named(lane: int, world_size: int) -> tuple[int, int] | tuple[None, None]:
    if lane == NEUTRAL:
        return None, None
    return divmod(lane, world_size)


def _marked_rank(lane: int) -> int | None:
    return -lane - 1 if lane < 0 else None
