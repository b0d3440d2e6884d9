"""The end of a group that shares memory: one word, from which every rank reads the same error.

Whoever learns first why the group cannot go on writes the word; the others adopt it. So all ranks
tell one story, however they notice it: by a deadline, by a process that is gone, or by the word.
"""

from dataclasses import dataclass
from enum import IntEnum

from ...errors import CollectiveTimeout, GroupError, InternalError, PeerLost

_RANK_BITS = 20
_ROUND_BITS = 40
"""Enough for a thousand rounds a second over 34 years."""


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


_WORDS: dict[EndingCause, str] = {
    EndingCause.LEFT: "rank {0} has left the group",
    EndingCause.LOST: "rank {0} was lost in round {1}: its process is gone",
    EndingCause.LATE: "rank {0} did not come to round {1} within the deadline",
    EndingCause.LOST_ELSEWHERE: "a rank of another host was lost in round {1}",
    EndingCause.LATE_ELSEWHERE: (
        "no word of round {1} came from the other hosts within the deadline"
    ),
    EndingCause.FAILED: "rank {0} could not speak for its host in round {1}; its log says why",
    EndingCause.DAMAGED: "what rank {0} wrote in round {1} is damaged: its checksum is wrong",
}


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
        cause_and_rank, last_round = word >> _ROUND_BITS, word & ((1 << _ROUND_BITS) - 1)
        try:
            cause = EndingCause(cause_and_rank >> _RANK_BITS)
        except ValueError:
            raise InternalError(f"the word {word} is not how a group can end") from None
        return cls(cause, cause_and_rank & ((1 << _RANK_BITS) - 1), last_round)

    @property
    def error(self) -> GroupError:
        """A new error that says what has happened, in the same words on every rank."""
        text = _WORDS[self.cause].format(self.rank, self.last_round + 1)
        if self.cause in (EndingCause.LATE, EndingCause.LATE_ELSEWHERE):
            return CollectiveTimeout(text)
        return PeerLost(text)
