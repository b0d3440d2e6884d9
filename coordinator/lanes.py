"""The lanes of a round: what each position of the vector means, and how a ballot fills them.

One int64 vector of a length that is fixed for the epoch, folded with MIN. A maximum travels as its
negative and equality as a pair (x, -x). Where it matters which rank was the smallest, the rank rides
along: `value * world_size + rank` has the same order as the value, and names the lowest such rank.

    header     epoch, round, state digest, layout digest: one pair each
               health: -(rank + 1) of a rank that cannot go on, else 0
               time: this rank's clock in milliseconds
               proposal: the digest of the one that this rank has staged, as a smallest and a largest
               of the ranks that have one; how ready this rank is: -(rank + 1) if it refuses, 0 if it
               has none, 1 if it has, 2 if it is ready
    queues     for each watermark: ended through this ticket; first failed ticket, named
    slots      for each prefetch in the ballot, by phase:
               QUERY      longest length that this rank can restore, at most the slot's bound, named,
                          or -1;                      -that length;    deadline
               RESTORABLE the same
               TRANSFER   pages landed;               ceiling, named;  deadline
               the deadline lane is -(rank + 1) of a rank that saw it pass, else 0

The meaning of the slots is given by the `Layout`, which replicated state determines and which is
frozen when the round is launched; its digest is voted on with the rest.
"""

from dataclasses import dataclass

import numpy as np
import xxhash

from ..errors import InternalError
from .ballot import UNBOUNDED, Ballot, Sightings
from .collectives.base import Vector
from .operation import Phase, Queue
from .proposal import NOTHING_STAGED, Readiness, Staged

NEUTRAL = 1 << 62
"""A lane that says nothing: it never is the minimum."""

NO_ANSWER = -1
"""The lookup lane of a rank whose store has not answered yet; it outweighs every answer."""

EPOCH, ROUND, STATE, LAYOUT = 0, 2, 4, 6
HEALTH, TIME = 8, 9
PROPOSAL, READINESS = 10, 12
HEADER_LANES = 13
PAIRS = {"epoch": EPOCH, "round": ROUND, "state digest": STATE, "layout digest": LAYOUT}
"""The header's equality pairs by name, each at its first lane."""

QUEUE_LANES = 2
SLOT_LANES = 3
QUEUES_AT = HEADER_LANES
SLOTS_AT = HEADER_LANES + QUEUE_LANES * len(Queue)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one prefetch in the ballot, for one round."""

    operation: int
    phase: Phase
    bound: int = UNBOUNDED
    """While lengths are agreed on: no rank votes for a longer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the lanes of one round mean. Equal on every rank, or the round says so."""

    epoch: int
    round: int
    state_digest: int
    """Of the replicated state at the launch; 63 bits."""
    slots: tuple[Slot, ...]

    @property
    def digest(self) -> int:
        """63 bits that differ where the slots differ."""
        flat = np.array(
            [(slot.operation, slot.phase, slot.bound) for slot in self.slots], dtype=np.int64
        )
        return xxhash.xxh3_64_intdigest(flat.tobytes()) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BallotShape:
    """The sizes that fix the vector's length for an epoch."""

    world_size: int
    slots: int

    @property
    def length(self) -> int:
        """The number of lanes."""
        return SLOTS_AT + SLOT_LANES * self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Voter:
    """What a rank says about itself in a round."""

    rank: int
    healthy: bool
    time_ms: int
    staged: Staged = NOTHING_STAGED


def encode(shape: BallotShape, layout: Layout, ballot: Ballot, voter: Voter) -> Vector:
    """Return this rank's vector for a round. Does not change the ballot's levels."""
    if len(layout.slots) > shape.slots:
        raise InternalError(f"{len(layout.slots)} prefetches in a ballot for {shape.slots}")
    lanes = [NEUTRAL] * shape.length
    for at, value in (
        (EPOCH, layout.epoch),
        (ROUND, layout.round),
        (STATE, layout.state_digest),
        (LAYOUT, layout.digest),
    ):
        lanes[at], lanes[at + 1] = value, -value
    lanes[HEALTH] = 0 if voter.healthy else -(voter.rank + 1)
    lanes[TIME] = voter.time_ms
    lanes[PROPOSAL : READINESS + 1] = _proposal_lanes(voter)
    at = QUEUES_AT
    for queue in Queue:
        ended_through, first_failed = ballot.watermark(queue)
        lanes[at] = ended_through
        if first_failed is not None:
            lanes[at + 1] = first_failed * shape.world_size + voter.rank
        at += QUEUE_LANES
    for slot in layout.slots:
        seen = ballot.sightings(slot.operation)
        lanes[at : at + SLOT_LANES] = _slot_lanes(slot, seen, shape.world_size, voter.rank)
        at += SLOT_LANES
    return np.array(lanes, dtype=np.int64)


def _proposal_lanes(voter: Voter) -> tuple[int, int, int]:
    staged = voter.staged
    if staged.readiness is Readiness.UNSTAGED:
        return NEUTRAL, NEUTRAL, staged.readiness
    ready = -(voter.rank + 1) if staged.readiness is Readiness.REFUSED else staged.readiness
    return staged.proposal, -staged.proposal, ready


def _slot_lanes(slot: Slot, seen: Sightings, world_size: int, rank: int) -> tuple[int, int, int]:
    deadline = -(rank + 1) if seen.expired else 0
    if slot.phase in (Phase.QUERY, Phase.RESTORABLE):
        if seen.answered is None:
            return NO_ANSWER, NEUTRAL, deadline
        longest = seen.answered.longest(slot.bound)
        return longest * world_size + rank, -longest, deadline
    if slot.phase is Phase.TRANSFER:
        ceiling = NEUTRAL if seen.ceiling == UNBOUNDED else seen.ceiling * world_size + rank
        return seen.landed, ceiling, deadline
    raise InternalError(f"an operation in phase {slot.phase.name} has no place in the ballot")
