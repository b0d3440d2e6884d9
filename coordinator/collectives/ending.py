"""The ending (terminal error) of a group, published to its ranks as one word in shared memory.

The first rank to detect that the group cannot continue writes the word, and the others adopt it.
Therefore all ranks raise the same error, however they noticed the end.
"""

from dataclasses import dataclass
from enum import IntEnum

from ...errors import CollectiveTimeout, GroupError, InternalError, PeerLost

_RANK_BITS = 20
_ROUND_BITS = 40
"""The number of bits that an encoded ending uses for a round number: enough for a thousand rounds per
second over 34 years."""


class EndingCause(IntEnum):
    """The reason why the group cannot complete another round."""

    LEFT = 1
    """A rank has closed its transport."""
    LOST = 2
    """A rank's process has ended."""
    LATE = 3
    """A rank did not join a round before the deadline."""
    LOST_ELSEWHERE = 4
    """The exchange with the other hosts failed, so a rank of another host counts as lost."""
    LATE_ELSEWHERE = 5
    """The other hosts sent nothing before the deadline."""
    FAILED = 6
    """The host's leader rank, which exchanges rounds with other hosts, failed with an error."""
    DAMAGED = 7
    """The lanes that a rank wrote fail their checksum."""


_WORDS: dict[EndingCause, str] = {
    EndingCause.LEFT: "rank {0} has left the group",
    EndingCause.LOST: "rank {0} was lost in round {1}: its process is gone",
    EndingCause.LATE: "rank {0} did not join round {1} before the deadline",
    EndingCause.LOST_ELSEWHERE: "a rank of another host was lost in round {1}",
    EndingCause.LATE_ELSEWHERE: ("the other hosts did not join round {1} before the deadline"),
    EndingCause.FAILED: "rank {0} failed to exchange round {1} with other hosts; see its log",
    EndingCause.DAMAGED: "the lanes that rank {0} wrote in round {1} have a wrong checksum",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a group ended, the rank that caused it, and the last round that may still complete."""

    cause: EndingCause
    rank: int
    """The rank that caused the ending, numbered in the whole group. For a cause on another host, this
    is the rank that reported the ending."""
    last_round: int
    """The last round that may still complete; every later round raises `error`."""

    @property
    def word(self) -> int:
        """The ending encoded as a positive 63-bit number."""
        return (self.cause << _RANK_BITS | self.rank) << _ROUND_BITS | self.last_round

    @classmethod
    def of(cls, word: int) -> "Ending":
        """Return the ending that a word encodes; raises `InternalError` for an invalid word."""
        cause_and_rank, last_round = word >> _ROUND_BITS, word & ((1 << _ROUND_BITS) - 1)
        try:
            cause = EndingCause(cause_and_rank >> _RANK_BITS)
        except ValueError:
            raise InternalError(f"the word {word} encodes no ending of a group") from None
        return cls(cause, cause_and_rank & ((1 << _RANK_BITS) - 1), last_round)

    @property
    def error(self) -> GroupError:
        """A new exception for this ending, with the same text on every rank."""
        text = _WORDS[self.cause].format(self.rank, self.last_round + 1)
        if self.cause in (EndingCause.LATE, EndingCause.LATE_ELSEWHERE):
            return CollectiveTimeout(text)
        return PeerLost(text)
