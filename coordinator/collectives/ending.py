"""The end of a group that shares memory: one word, from which every rank reads the same error.

Whoever learns first why the group cannot go on writes the word; the others adopt it. So all ranks
tell one story, however they notice it: by a deadline, by a process that is gone, or by the word.
"""

from dataclasses import dataclass
from enum import IntEnum

from ...errors import CollectiveTimeout, GroupError, InternalError, PeerLost

_RANK_BITS = 20
_ROUND_BITS = 40

ROUNDS_MAX = (1 << _ROUND_BITS) - 1
"""The highest number of a round: enough for a thousand rounds a second over 34 years."""


class EndingCause(IntEnum):
    """Why no further round can come about."""

    LEFT = 1
    """A rank has closed its transport."""
    LOST = 2
    """A rank's process has ended."""
    LATE = 3
    """A rank did not come within the deadline."""
    LOST_ELSEWHERE = 4
    """Some rank of another host is gone."""
    LATE_ELSEWHERE = 5
    """No word came from the other hosts within the deadline."""
    FAILED = 6
    """A rank that speaks for its host has met an error of its own."""
    DAMAGED = 7
    """What a rank wrote is not what the others read."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a group."""

    cause: EndingCause
    rank: int
    """The rank, in the whole group, that has caused it, or that tells of a cause elsewhere."""
    last_round: int
    """The last round that may still come about; every later one raises `error`."""

    @property
    def word(self) -> int:
        """The ending as a positive number of 63 bits."""
        return (self.cause << _RANK_BITS | self.rank) << _ROUND_BITS | self.last_round

    @classmethod
    def of(cls, word: int) -> "Ending":
        """Return the ending that a word stands for; raises `InternalError` if it is none."""
        cause_and_rank, last_round = word >> _ROUND_BITS, word & ROUNDS_MAX
        try:
            cause = EndingCause(cause_and_rank >> _RANK_BITS)
        except ValueError:
            raise InternalError(f"the word {word} is not how a group can end") from None
        return cls(
            cause=cause,
            rank=cause_and_rank & ((1 << _RANK_BITS) - 1),
            last_round=last_round,
        )

    @property
    def error(self) -> GroupError:
        """A new error that says what has happened, in the same words on every rank."""
        number = self.last_round + 1
        match self.cause:
            case EndingCause.LEFT:
                return PeerLost(f"rank {self.rank} has left the group")
            case EndingCause.LOST:
                return PeerLost(f"rank {self.rank} was lost in round {number}: its process is gone")
            case EndingCause.LATE:
                return CollectiveTimeout(
                    f"rank {self.rank} did not come to round {number} within the deadline"
                )
            case EndingCause.LOST_ELSEWHERE:
                return PeerLost(f"a rank of another host was lost in round {number}")
            case EndingCause.LATE_ELSEWHERE:
                return CollectiveTimeout(
                    f"no word of round {number} came from the other hosts within the deadline"
                )
            case EndingCause.FAILED:
                return PeerLost(
                    f"rank {self.rank} could not speak for its host in round {number};"
                    " its log says why"
                )
            case EndingCause.DAMAGED:
                return PeerLost(
                    f"what rank {self.rank} wrote in round {number} is damaged: its checksum is wrong"
                )
