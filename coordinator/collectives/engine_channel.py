"""The engine's own channel as a transport, for an engine with one scheduler and one worker per rank.

The replica lives in the scheduler's process, which is not a rank. The header of a round travels with
the engine's step message and launches the round. Each worker fills its ballot, and the engine returns
the folded ballots with the step's outputs. The engine sends and waits under its own deadlines (rule
R10), so this module does neither.

The engine may drop a worker's output that looks empty. If any rank's ballot is missing, the round has
no verdict and is requested again. Repeating a round is safe because each ballot reports everything that
is true so far (rule R13).
"""

from dataclasses import dataclass

import numpy as np

from ...errors import CollectiveTimeout, InternalError, PeerLost, UsageError
from ..collective import CommonStore, Vector
from ..lanes import ROUND


@dataclass(frozen=True, slots=True, eq=False)
class FoldedBallots:
    """The folded ballots of some ranks in one round."""

    round: int
    ranks: int
    """A bit mask of the ranks whose ballots are included: bit r is rank r."""
    lanes: Vector

    def joined(self, other: "FoldedBallots") -> "FoldedBallots":
        """Return these ballots folded with `other`, which must belong to the same round.

        Raises `InternalError` for ballots of different rounds, because some rank then missed a step
        message.
        """
        if self.round != other.round:
            raise InternalError(
                f"ranks {_named(self.ranks)} voted in round {self.round} and ranks"
                f" {_named(other.ranks)} in round {other.round}; the engine lost a step message"
            )
        folded: Vector = np.minimum(self.lanes, other.lanes)
        return FoldedBallots(self.round, self.ranks | other.ranks, folded)


class EngineChannel:
    """The scheduler's side of the engine's channel; see `Collective`. The scheduler does not vote."""

    transport: str = "engine"
    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.launches = 0
        self._all = (1 << world_size) - 1
        self._pending: int | None = None
        """The number of the round that was launched and not yet waited for; None if there is none."""
        self._arrived: Vector | None = None
        self.must_repeat = False
        """Whether the pending round must be requested again because a rank's ballot is missing."""
        self._closed = False

    @property
    def answered(self) -> bool:
        """Whether no round is pending, or every rank's ballot of the pending round has arrived."""
        return self._pending is None or self._arrived is not None

    def launch(self, lanes: Vector) -> "EngineChannel":
        """Record that a round is pending. Its header travels with the engine's step message."""
        if self._closed:
            raise PeerLost("the engine channel is closed")
        self.launches += 1
        self._pending, self._arrived, self.must_repeat = int(lanes[ROUND]), None, False
        return self

    def deliver(self, ballots: FoldedBallots) -> None:
        """Accept folded ballots that the engine returned; ignore those of a finished round."""
        if self._pending is None or ballots.round < self._pending or self._arrived is not None:
            return
        if ballots.round > self._pending:
            raise InternalError(
                f"the workers voted in round {ballots.round}, must be round {self._pending}"
            )
        if ballots.ranks == self._all:
            self._arrived, self.must_repeat = ballots.lanes, False
        else:
            self.must_repeat = True

    def wait(self, timeout_s: float) -> Vector:  # noqa: ARG002 - nothing is waited for.
        """Return the fold that `deliver` received, without blocking; see `PendingRound`."""
        arrived, number = self._arrived, self._pending
        if self._closed:
            raise PeerLost("the engine channel is closed")
        if arrived is None:
            raise CollectiveTimeout(f"the engine has not delivered the ballots of round {number}")
        self._pending = self._arrived = None
        return arrived

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:  # noqa: ARG002
        """Raise `UsageError`: this channel has no gather. Workers compare settings at start-up."""
        raise UsageError("the engine channel does not support gather")

    def common_store(self, name: str) -> CommonStore:  # noqa: ARG002
        """Raise `UsageError`: this channel has no key-value store."""
        raise UsageError("the engine channel has no common store")

    def close(self) -> None:
        self._closed = True


def _named(ranks: int) -> str:
    return ", ".join(str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1)
