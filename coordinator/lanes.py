"""The lanes of a round: what each position of the vector means.

One int64 vector of a length that is fixed for the epoch, folded with MIN. A maximum travels as its
negative and equality as a pair (x, -x). Where it matters which rank was the smallest, the rank rides
along: `value * world_size + rank` has the same order as the value, and names the lowest such rank.

    header     epoch, round, state digest, layout digest: one pair each
               health: -(rank + 1) of a rank that cannot go on, else 0
               time: this rank's clock in milliseconds
               proposal: the digest of the one that this rank has staged, as a smallest and a largest
               of the ranks that have one; how ready this rank is: -(rank + 1) if it refuses, 0 if it
               has none, 1 if it has, 2 if it is ready
               requests: how many this rank has in a row, from the first, NEUTRAL where it takes none;
               -(how many there are, as far as this rank knows)
    queues     for each watermark: ended through this ticket; first failed ticket, named
    seats      for each seat, by the phase of the prefetch that has it; NEUTRAL where nobody has it:
               QUERY      longest length that this rank can restore, at most the seat's bound, named,
                          or -1;                      -that length;    deadline
               RESTORABLE the same
               TRANSFER   pages landed;               ceiling, named;  deadline
               the deadline lane is -(rank + 1) of a rank that saw it pass, else 0

The meaning of the seats is given by the `LaneLayout`, which replicated state determines and which is
frozen when the round is launched; its digest is voted on with the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from struct import Struct

import msgspec
import numpy as np

from .collective import Vector
from .operation import Queue
from .proposal import NOTHING_STAGED, Staged
from .seats import SeatTable

NEUTRAL = 1 << 62
"""A lane that says nothing: it never is the minimum."""

NO_ANSWER = -1
"""The lookup lane of a rank whose store has not answered yet; it outweighs every answer."""

EPOCH, ROUND, STATE, LAYOUT = 0, 2, 4, 6
HEALTH, TIME = 8, 9
PROPOSAL, READINESS = 10, 12
REQUESTS, NEWEST = 13, 14
HEADER_LANES = 15
PAIRS = {"epoch": EPOCH, "round": ROUND, "state digest": STATE, "layout digest": LAYOUT}
"""The header's equality pairs by name, each at its first lane."""

QUEUE_LANES = 2
SEAT_LANES = 3
QUEUES_AT = HEADER_LANES
SEATS_AT = HEADER_LANES + QUEUE_LANES * len(Queue)


class LaneLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of the lanes of one round. Equal on every rank, or the round says so."""

    epoch: int
    round: int
    state_digest: int
    """The digest of the replicated state at the launch; 63 bits."""
    seats: SeatTable


@dataclass(frozen=True, slots=True, kw_only=True)
class BallotShape:
    """The sizes that fix the vector's length for an epoch."""

    world_size: int
    seats: int

    @property
    def length(self) -> int:
        """The number of lanes."""
        return SEATS_AT + SEAT_LANES * self.seats


class Voter(msgspec.Struct, frozen=True, kw_only=True):
    """The statement of a rank about itself in a round."""

    healthy: bool
    time_ms: int
    staged: Staged = NOTHING_STAGED
    requests: int | None = None
    """How many requests this rank has in a row, from the epoch's first; None where it takes none."""
    newest: int = 0
    """How many there are, as far as this rank knows."""


_HEADER = Struct(f"{HEADER_LANES}q")


def write_header(lanes: Vector, layout: LaneLayout, voter: Voter, rank: int) -> None:
    """Write the header of a round into the vector of `rank`."""
    epoch, number, state, seats = (
        layout.epoch,
        layout.round,
        layout.state_digest,
        layout.seats.digest,
    )
    smallest = largest = NEUTRAL
    ready: int = 0
    if voter.staged.readiness:
        smallest, largest = voter.staged.proposal, -voter.staged.proposal
        ready = voter.staged.readiness if voter.staged.readiness > 0 else -(rank + 1)
    _HEADER.pack_into(
        lanes.data,
        0,
        *(epoch, -epoch, number, -number, state, -state, seats, -seats),
        *(0 if voter.healthy else -(rank + 1), voter.time_ms),
        *(smallest, largest, ready),
        *(NEUTRAL if voter.requests is None else voter.requests, -voter.newest),
    )


def read_header(lanes: memoryview | bytes) -> Sequence[int]:
    """Return the lanes of the header of a round."""
    return _HEADER.unpack_from(lanes)


def fold(ballots: Sequence[Vector] | Vector) -> Vector:
    """Return the element-wise minimum: what `all_reduce(MIN)` gives every rank.

    `ballots` are vectors, or one array with a row for each. One alone is returned as it is.
    """
    return reduce(np.minimum, ballots)


def disagreements(header: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the folded header's pairs that are not equal over the ranks.

    A pair (x, -x) folds to (min x, -max x): the ranks are equal exactly if the sum is zero.
    """
    different: tuple[str, ...] = ()
    for name, at in PAIRS.items():
        if header[at] + header[at + 1]:
            different += (name,)
    return different
