"""The engine's own channel as a transport: for an engine with one scheduler and a worker for each rank.

The replica lives in the scheduler's process, beside no rank at all. What it launches a round with is
only the round's header, which travels to the workers with the engine's own orders for a step; each
worker fills its ballot, and the engine brings the ballots back with the outputs of that step, folded on
the way. Nothing here sends or waits: the engine does, and its own deadlines hold (rule R10).

The engine may leave workers out whose output it takes for empty. A fold that lacks a rank is no round:
it is asked for again, which changes nothing, since ballots are levels (rule R13).
"""

from dataclasses import dataclass

import numpy as np

from ...errors import CollectiveTimeout, InternalError, PeerLost, UsageError
from ..collective import CommonStore, Vector
from ..lanes import ROUND


@dataclass(frozen=True, slots=True, eq=False)
class FoldedBallots:
    """The ballots of some ranks in one round, folded."""

    round: int
    ranks: int
    """The ranks whose ballots are in it: bit r stands for rank r."""
    lanes: Vector

    def joined(self, other: "FoldedBallots") -> "FoldedBallots":
        """Return the fold of both, of which the order does not matter.

        Raises `InternalError` for ballots of two rounds: ranks that are in different rounds have been
        told different things.
        """
        if self.round != other.round:
            raise InternalError(
                f"ranks {_named(self.ranks)} voted in round {self.round} and ranks"
                f" {_named(other.ranks)} in round {other.round}; the engine has lost a step's orders"
            )
        folded: Vector = np.minimum(self.lanes, other.lanes)
        return FoldedBallots(self.round, self.ranks | other.ranks, folded)


class EngineChannel:
    """The decider's end of the channel; see `Collective`. It is no rank, and has no vote."""

    transport: str = "engine"
    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.launches = 0
        self._all = (1 << world_size) - 1
        self._asked: int | None = None
        """The number of the round that was launched and has not been waited for."""
        self._arrived: Vector | None = None
        self.asks_again = False
        """Whether the pending round has to be asked for again, since a rank's ballot was left out."""
        self._closed = False

    @property
    def answered(self) -> bool:
        """Whether no round is pending, or its ballots are all here, so that waiting takes no time."""
        return self._asked is None or self._arrived is not None

    def launch(self, lanes: Vector) -> "EngineChannel":
        """Note that a round is under way; see `Collective`. The lanes themselves are not sent."""
        if self._closed:
            raise PeerLost("the cache has left its workers")
        self.launches += 1
        self._asked, self._arrived, self.asks_again = int(lanes[ROUND]), None, False
        return self

    def deliver(self, ballots: FoldedBallots) -> None:
        """Take what the engine has brought of a round. Ballots of one that is over change nothing."""
        if self._asked is None or ballots.round < self._asked or self._arrived is not None:
            return
        if ballots.round > self._asked:
            raise InternalError(
                f"the workers voted in round {ballots.round}, and {self._asked} was launched"
            )
        if ballots.ranks == self._all:
            self._arrived, self.asks_again = ballots.lanes, False
        else:
            self.asks_again = True

    def wait(self, timeout_s: float) -> Vector:  # noqa: ARG002 - nothing is waited for.
        """Return the fold, which has been delivered; see `PendingRound`."""
        arrived, number = self._arrived, self._asked
        if self._closed:
            raise PeerLost("the cache has left its workers")
        if arrived is None:
            raise CollectiveTimeout(f"the engine has not brought the ballots of round {number} yet")
        self._asked = self._arrived = None
        return arrived

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:  # noqa: ARG002
        """There is nobody to gather from: the workers have compared everything when they started."""
        raise UsageError("an engine's own channel gathers nothing")

    def common_store(self, name: str) -> CommonStore:  # noqa: ARG002
        """There is nobody to share a store with."""
        raise UsageError("an engine's own channel has no store")

    def close(self) -> None:
        self._closed = True


def _named(ranks: int) -> str:
    return ", ".join(str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1)
