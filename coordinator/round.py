"""Rounds: one collective per step, and its verdict, identical on every rank.

The protocol. Every rule has a test that names it (`tests/coordinator/test_protocol.py`).

P1  Every step launches exactly one collective, of one length. A rank's local progress sets the contents
    of its lanes, never whether, when or how it votes.
P2  A round is launched under a layout that replicated state determines. The layout is frozen at launch,
    and the verdict is read under it even if the state has changed since. A verdict names only changes
    since the previous verdict; see `verdict`.
P3  Depth 1: a step applies the previous step's verdict, then launches its own round. Depth 0: a step
    launches its round, waits for it and applies it. Both use `open` and `close`, in different order.
    At most one round is pending.
P4  Every rank applies a round at the same step: `close` waits for the round, up to a deadline. If the
    deadline passes, the epoch ends; no rank continues alone.
P5  The header is read first. If the ranks differ in epoch, round, state digest or layout digest, the
    body is ignored and the epoch ends on every rank in this same round.
P6  A rank that must stop sets its health lane; the epoch ends on every rank in the same round.
P7  Ballots are levels: each ballot reports everything that is true, so a vote that a verdict did not
    use is repeated in the next round.
P8  After an epoch has ended, every call raises the same error again and launches no collective.

This module reads no clock; only its transport waits.
"""

from contextlib import suppress
from typing import NoReturn

from ..errors import (
    CollectiveTimeout,
    GroupError,
    InternalError,
    PeerLost,
    RankUnhealthy,
    UsageError,
)
from .ballot import Ballot
from .collective import Collective, PendingRound
from .divergence import Recorder, explain
from .lanes import BallotShape, LaneLayout, Voter, disagreements, read_header
from .prefetch_slots import PrefetchSlotTable
from .verdict import Verdict, Verdicts, unhealthy_rank

EXPLAIN_TIMEOUT_S = 10.0
"""Seconds to wait for the ranks' flight recorders (latest changes of each replica) after a divergence.
"""


class Rounds:
    """The rounds of one epoch on one rank. Not thread-safe."""

    def __init__(
        self,
        collective: Collective,
        shape: BallotShape,
        *,
        timeout_s: float,
        recorder: Recorder,
        epoch: int,
    ) -> None:
        """Start the rounds of an epoch.

        `epoch` must be equal on all ranks and different from that of every other start of the group.
        """
        self.shape = shape
        self.epoch = epoch
        self.count = 0
        """The number of rounds launched, which is also the number of the last round."""
        self._collective = collective
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._length = shape.length
        self._verdicts = Verdicts(shape)
        self._launched: tuple[LaneLayout, PendingRound] | None = None
        self.ended_by: GroupError | InternalError | None = None
        """The error that ended the epoch; None while the epoch lasts."""

    @property
    def pending(self) -> bool:
        """Whether a round was launched and not yet closed."""
        return self._launched is not None

    def open(
        self,
        prefetch_slots: PrefetchSlotTable,
        state_digest: int,
        ballot: Ballot,
        voter: Voter,
    ) -> None:
        """Launch a round and freeze its layout (P1, P2)."""
        self.require_going()
        if self._launched is not None:
            raise UsageError("a round is pending already; close it first")
        layout = LaneLayout(
            epoch=self.epoch,
            round=self.count + 1,
            state_digest=state_digest,
            prefetch_slots=prefetch_slots,
        )
        try:
            self._launched = layout, self._collective.launch(ballot.fill(layout, voter))
            self.count += 1
        except (GroupError, InternalError) as error:
            self.end(error)
        except BaseException as error:
            # If the launch fails, this rank's vote may or may not have been sent, so the epoch cannot
            # continue.
            number, what = self.count + 1, type(error).__name__
            with suppress(PeerLost):
                self.end(PeerLost(f"this rank was interrupted in round {number}: {what}"))
            raise

    def close(self) -> Verdict:
        """Wait for the pending round and return its verdict (P4, P5, P6)."""
        self.require_going()
        if self._launched is None:
            raise UsageError("no round is pending; open one first")
        layout, pending = self._launched
        try:
            folded = pending.wait(self._timeout_s)
        except CollectiveTimeout as error:
            limit = f"a round may take {self._timeout_s:g} s (timeouts.round_s)"
            self.end(CollectiveTimeout(f"{error}; {limit}"))
        except (GroupError, InternalError) as error:
            self.end(error)
        self._launched = None
        if folded.shape != (self._length,):
            self.end(
                InternalError(f"a round returned shape {folded.shape}, must be ({self._length},)")
            )
        header = read_header(folded.data)
        different = disagreements(header)
        if different:
            self.end(explain(self._collective, self._recorder, different, EXPLAIN_TIMEOUT_S))
        unhealthy = unhealthy_rank(header)
        if unhealthy is not None:
            self.end(RankUnhealthy(f"rank {unhealthy} cannot continue; see its log"))
        return self._verdicts.read(layout, folded)

    def shorten_timeout(self, timeout_s: float) -> None:
        """Lower the timeout of all later waits to `timeout_s`, for a rank that must stop soon."""
        self._timeout_s = min(self._timeout_s, timeout_s)

    def end(self, error: GroupError | InternalError) -> NoReturn:
        """End the epoch with an error, which every later call raises again (P8).

        Called when this rank met the error in a round, or when every rank derived it from a verdict.
        """
        # Close the transport at once, so that ranks waiting for this rank notice without a timeout.
        self.ended_by, self._launched = error, None
        self._collective.close()
        raise error

    def require_going(self) -> None:
        """Raise the error that ended the epoch, if there is one (P8)."""
        if self.ended_by is not None:
            # Drop the traceback: the same error object is raised each time and would accumulate frames.
            raise self.ended_by.with_traceback(None)
