"""The lanes of a round: the meaning of each position in the vector.

A round is one int64 vector whose length is fixed for the epoch, folded with MIN. A maximum travels
negated, equality as a pair (x, -x). A "named" lane carries `value * world_size + rank`, so the minimum
also names the lowest rank with the smallest value.

    header     epoch, round, state digest, layout digest: one pair each
               health: -(rank + 1) of a rank that must stop, else 0
               time: this rank's clock in milliseconds
               proposal: smallest and largest digest, over the ranks that have staged a proposal;
               readiness: -(rank + 1) if this rank refuses it, 0 if none, 1 if staged, 2 if ready
               requests: number up to which this rank has every control request (numbered from 1),
               NEUTRAL if it receives none; then -(number of the newest that it knows of)
    queues     for each watermark queue: index up to which all operations have finished;
               index of the first failed operation, named
    slots      for each prefetch slot, by phase of its prefetch; NEUTRAL if the slot is free:
               QUERY      longest length that this rank can restore within the slot's bound, named,
                          or -1;                      -that length;    deadline
               RESTORABLE the same as in QUERY
               TRANSFER   pages landed;               ceiling (most pages that can land), named;
                                                      deadline
               the deadline lane is -(rank + 1) of a rank whose deadline passed, else 0

The `LaneLayout` defines the prefetch slots' lanes. It is derived from replicated state and frozen when
the round is launched, and the header carries its digest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from struct import Struct

import msgspec
import numpy as np

from .collective import Vector
from .operation import Queue
from .prefetch_slots import PrefetchSlotTable
from .proposal import NOTHING_STAGED, StagedLanes

NEUTRAL = 1 << 62
"""The value of a lane without a vote. No real value is larger, so it never wins the MIN."""

NO_ANSWER = -1
"""The value of a slot's first lane while this rank's store has not answered the lookup; lower than
every answer."""

EPOCH, ROUND, STATE, LAYOUT = 0, 2, 4, 6
HEALTH, TIME = 8, 9
PROPOSAL, READINESS = 10, 12
REQUESTS, NEWEST = 13, 14
HEADER_LANES = 15
PAIRS = {"epoch": EPOCH, "round": ROUND, "state digest": STATE, "layout digest": LAYOUT}
"""The header's equality pairs by name, each with the index of its first lane."""

QUEUE_LANES = 2
SLOT_LANES = 3
QUEUES_AT = HEADER_LANES
SLOTS_AT = HEADER_LANES + QUEUE_LANES * len(Queue)


class LaneLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of the lanes in one round. The header has its digest, to detect differing ranks."""

    epoch: int
    round: int
    state_digest: int
    """The 63-bit digest of the replicated state when the round was launched."""
    prefetch_slots: PrefetchSlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class BallotShape:
    """The sizes that fix the vector's length for an epoch."""

    world_size: int
    prefetch_slots: int

    @property
    def length(self) -> int:
        """The number of lanes in a vector."""
        return SLOTS_AT + SLOT_LANES * self.prefetch_slots


class Voter(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report in a round's header: health, clock, staged proposal and control requests."""

    healthy: bool
    time_ms: int
    staged: StagedLanes = NOTHING_STAGED
    requests: int | None = None
    """The number up to which this rank has received every control request since the epoch began; None
    if this rank receives none."""
    newest: int = 0
    """The number of the newest control request that this rank knows of."""


_HEADER = Struct(f"{HEADER_LANES}q")


def write_header(lanes: Vector, layout: LaneLayout, voter: Voter, rank: int) -> None:
    """Write the header of a round into the vector of `rank`."""
    epoch, number, state, prefetch_slots = (
        layout.epoch,
        layout.round,
        layout.state_digest,
        layout.prefetch_slots.digest,
    )
    smallest = largest = NEUTRAL
    ready: int = 0
    if voter.staged.readiness:
        smallest, largest = voter.staged.proposal, -voter.staged.proposal
        ready = voter.staged.readiness if voter.staged.readiness > 0 else -(rank + 1)
    _HEADER.pack_into(
        lanes.data,
        0,
        *(epoch, -epoch, number, -number, state, -state, prefetch_slots, -prefetch_slots),
        *(0 if voter.healthy else -(rank + 1), voter.time_ms),
        *(smallest, largest, ready),
        *(NEUTRAL if voter.requests is None else voter.requests, -voter.newest),
    )


def read_header(lanes: memoryview | bytes) -> Sequence[int]:
    """Return the header's lanes, taken from the bytes of a round's vector."""
    return _HEADER.unpack_from(lanes)


def fold(ballots: Sequence[Vector] | Vector) -> Vector:
    """Return the element-wise minimum, as `all_reduce(MIN)` gives it to every rank.

    `ballots` are vectors, or one array with a row for each rank. A single vector is returned uncopied.
    """
    return reduce(np.minimum, ballots)


def disagreements(header: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the header's equality pairs that differ between ranks.

    A pair (x, -x) folds to (min x, -max x), so the ranks agree exactly if the sum is zero.
    """
    different: tuple[str, ...] = ()
    for name, at in PAIRS.items():
        if header[at] + header[at + 1]:
            different += (name,)
    return different
