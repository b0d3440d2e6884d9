"""A worker's process in one-scheduler mode: the executor and the ballot of one rank.

The worker applies a dispatch's messages in order before the step's forward pass, starts copies around
the pass, and votes after the pass. If the engine has a drafter, the worker votes before the step's
backups start. The next vote then reports these backups.
"""

from collections.abc import Callable

import numpy as np

from ....coordinator.ballot import Ballot
from ....coordinator.collectives.engine_channel import FoldedBallots
from ....coordinator.lanes import BallotShape, LaneLayout
from ....coordinator.prefetch_slots import PrefetchSlotTable
from ....coordinator.proposal import Proposal
from ...executor.base import Executor
from ...protocol.dispatch import DISPATCHES, CarryOut, Expect, GiveUp, Log, Prepare, Rest, Vote
from ...protocol.orders import AttachStore, DetachStore, Direction, Fence
from ..member.ballot_header import BallotHeader
from ..member.log_level import log_from

_NO_ROWS = np.empty((0, 3), dtype=np.int64)


class WorkerRank:
    """One rank in one-scheduler mode. All calls come from the worker's thread."""

    def __init__(
        self,
        executor: Executor,
        shape: BallotShape,
        rank: int,
        *,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """`shape` is the group's ballot shape. Closing this rank also closes `executor`."""
        self.executor = executor
        self.rank = rank
        self._ballot = Ballot(shape, rank)
        self._voting = BallotHeader(rank, executor, self._ballot, clock_ms)
        self._last_number = 0
        self._rest_s = 0.0
        self._vote: Vote | None = None
        self._trouble: str | None = None

    def apply_dispatch(self, dispatch: bytes) -> None:
        """Apply the scheduler's dispatch; copies wait for `begin_loads` and `begin_backups`.

        Returns once no copy touches device pages that the engine is about to overwrite. Raises
        `WireError` for invalid bytes.
        """
        step = DISPATCHES.decode(dispatch)
        if step.number != self._last_number + 1 and self._trouble is None:
            self._trouble = (
                f"dispatch {step.number} of the scheduler arrived after {self._last_number}"
            )
        self._last_number = step.number
        self._rest_s, self._vote = 0.0, None
        for message in step.messages:
            match message:
                case Expect(expectations=expectations):
                    self._ballot.follow(expectations)
                case CarryOut(orders=orders):
                    if any(isinstance(order, AttachStore | DetachStore) for order in orders):
                        self._voting.staging.end(unstages=False)
                    self.executor.carry_out(orders)
                case Prepare(change=change, store=store):
                    self._voting.staging.stage(Proposal(change, store))
                case GiveUp():
                    self._voting.staging.end(unstages=True)
                case Log(level=level):
                    log_from(level)
                case Rest(at_most_s=at_most_s):
                    self._rest_s = at_most_s
                case Vote():
                    self._vote = message

    def begin_loads(self) -> None:
        """Start the copies to the device. Call before launching this step's forward pass."""
        self.executor.begin_copies(Direction.TO_DEVICE)

    def begin_backups(self) -> None:
        """Start the copies to the host. Call after launching this step's forward pass."""
        self.executor.begin_copies(Direction.TO_HOST)

    def vote(self) -> FoldedBallots | None:
        """Return this rank's ballot of the step; None if the step has no round."""
        if self._rest_s:
            self.executor.wait(self._rest_s)
        if self._vote is None:
            return None
        progress = self.executor.progress()
        voter = self._voting.vote(progress, trouble=self._trouble)
        vote = self._vote
        layout = LaneLayout(
            epoch=vote.epoch,
            round=vote.round,
            state_digest=vote.state_digest,
            prefetch_slots=PrefetchSlotTable(_NO_ROWS, vote.layout_digest),
        )
        return FoldedBallots(vote.round, 1 << self.rank, self._ballot.fill(layout, voter))

    def wait_for_copies(self, timeout_s: float) -> None:
        """Block until no copy touches a device page, so that the engine can unmap its pages.

        A copy still running after `timeout_s` fails.
        """
        self.executor.carry_out([Fence(None, timeout_s)])

    def close(self) -> None:
        """Stop all I/O and wait, with a timeout, until no I/O touches a page. Idempotent."""
        self.executor.close()
