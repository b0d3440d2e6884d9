"""The worker's side of the connector, for a scheduler in the same process or in another process.

In both modes the worker starts copies at the right points of the forward pass. If the scheduler is in
another process, the worker also carries out orders and returns its ballot (vote).
"""

import time
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...coordinator.collectives.engine_channel import FoldedBallots
from ...errors import InternalError
from ...ranks.executor.base import ExecutorCounts
from ...ranks.group.one_scheduler.worker import WorkerRank
from .rank_channel import RankChannel
from .stats import REPORT_EVERY_S
from .tracked import PassResult


@dataclass
class PassMetadata(KVConnectorMetadata):
    """Message from the scheduler's connector to the workers' connectors for one step."""

    result: PassResult
    dispatch: bytes = b""
    """Encoded orders, if the scheduler is in another process; otherwise empty."""
    computes: bool = True
    """Whether the step runs a forward pass."""


@dataclass
class OpenedRank(KVConnectorHandshakeMetadata):
    """Handshake message with which a worker describes its opened rank to the scheduler, encoded."""

    opened: bytes


@dataclass
class Ballots(KVConnectorWorkerMetadata):
    """Carries workers' ballots to the scheduler, folded into one when vLLM merges the messages."""

    folded: FoldedBallots
    counts: dict[int, ExecutorCounts] = field(default_factory=dict[int, ExecutorCounts])
    """Counters of executors, by rank. Only ranks whose workers sent counters in this step are included.
    """

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Ballots":
        """Return one message with the folded ballots and the counters of both messages."""
        if not isinstance(other, Ballots):
            raise InternalError(f"a worker answered with a {type(other).__name__}")
        return Ballots(self.folded.joined(other.folded), self.counts | other.counts)


class SchedulerOnEveryRank:
    """Worker mode for a scheduler in the same process: starts the copies of the scheduler's cache."""

    def __init__(self, handover: RankChannel) -> None:
        self._handover = handover

    def apply_metadata(self, metadata: PassMetadata) -> None:
        """Do nothing, because the cache in this process already has the scheduler's commands."""

    def begin_loads(self) -> None:
        """Start the step's loads, which copy from host to device."""
        self._handover.opened.begin_loads()

    def begin_backups(self) -> None:
        """Start the step's backups, which copy from device to host."""
        self._handover.opened.begin_backups()

    def ballots(self) -> Ballots | None:
        """Return None, because the cache in this process sends this rank's ballot itself."""
        return None

    def wait_for_copies(self) -> None:
        """Wait for all copies, because the engine is about to unmap its KV."""
        self._handover.opened.wait_for_copies()

    def close(self) -> None:
        """Do nothing, because the scheduler's side closes the cache."""


class RemoteScheduler:
    """Worker mode for a scheduler in another process: carries out the orders that it sends."""

    def __init__(self, rank: WorkerRank, fence_s: float, *, drafts_last: bool = False) -> None:
        """`fence_s` is the timeout of each wait for copies from blocks that are to be reused.

        `drafts_last` is True if the drafter writes its KV only after `begin_backups`; see
        `drafts_after_saves`.
        """
        self._rank = rank
        self._fence_s = fence_s
        self._drafts_last = drafts_last
        self._late = False
        """Whether the last step's backups are still to be started, because they had to wait for the
        drafter's KV."""
        self._counts_due_s = 0.0
        self._applied: PassMetadata | None = None

    def apply_metadata(self, metadata: PassMetadata) -> None:
        # Carry out each step's metadata only once. vLLM may pass it twice: before blocks are
        # overwritten, and before the forward pass.
        if metadata is not self._applied:
            self._begin_late_backups()
            self._applied = metadata
            self._rank.apply_dispatch(metadata.dispatch)

    def begin_loads(self) -> None:
        self._rank.begin_loads()

    def begin_backups(self) -> None:
        self._late = self._drafts_last
        if not self._late:
            self._rank.begin_backups()

    def ballots(self) -> Ballots | None:
        folded = self._rank.vote()
        return None if folded is None else Ballots(folded, self._counts())

    def wait_for_copies(self) -> None:
        self._begin_late_backups()
        self._rank.wait_for_copies(self._fence_s)

    def close(self) -> None:
        self._rank.close()

    def _counts(self) -> dict[int, ExecutorCounts]:
        """Return this rank's counters if they are due or the step computes nothing; otherwise {}."""
        now = time.monotonic()
        if now < self._counts_due_s and (self._applied is None or self._applied.computes):
            return {}
        self._counts_due_s = now + REPORT_EVERY_S
        return {self._rank.rank: self._rank.executor.counts()}

    def _begin_late_backups(self) -> None:
        """Start the last step's backups now if they had to wait for the drafter's KV."""
        if self._late:
            self._late = False
            self._rank.begin_backups()


WorkerHalf: TypeAlias = SchedulerOnEveryRank | RemoteScheduler
