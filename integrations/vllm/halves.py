"""The worker's half of the connector, by where the scheduler's half is: beside it, or elsewhere.

Both begin the copies where the forward pass stands. With the scheduler elsewhere this rank also hears
from it what to do, and answers with its ballot.
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
from ...ranks.group.decider.worker import WorkerRank
from .handover import Handover
from .stats import TOLD_EVERY_S
from .tracked import PassResult


@dataclass
class PassMetadata(KVConnectorMetadata):
    """Carries what the scheduler's half gives the worker's half for one step."""

    result: PassResult
    dispatch: bytes = b""
    """What a scheduler elsewhere tells its workers; empty where it is in the same process."""
    computes: bool = True
    """Whether the step computes anything."""


@dataclass
class OpenedRank(KVConnectorHandshakeMetadata):
    """Carries what a worker tells the scheduler when it has opened its rank."""

    opened: bytes


@dataclass
class Ballots(KVConnectorWorkerMetadata):
    """Carries the ballots of workers to the scheduler, and folds them on the way."""

    folded: FoldedBallots
    counts: dict[int, ExecutorCounts] = field(default_factory=dict[int, ExecutorCounts])
    """The executors' counters by rank, of the workers that have sent them with this ballot."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Ballots":
        """Return the ballots of both."""
        if not isinstance(other, Ballots):
            raise InternalError(f"a worker answered with a {type(other).__name__}")
        return Ballots(self.folded.joined(other.folded), self.counts | other.counts)


class BesideScheduler:
    """Leaves everything but the moments of copies to the cache of the scheduler in this process."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover

    def obey(self, metadata: PassMetadata) -> None:
        """Do what the scheduler tells before this step overwrites any block: the cache was told."""

    def begin_loads(self) -> None:
        """Begin the copies to the device."""
        self._handover.opened.begin_loads()

    def begin_backups(self) -> None:
        """Begin the copies to the host."""
        self._handover.opened.begin_backups()

    def ballots(self) -> Ballots | None:
        """Return this rank's ballot of the step, if the scheduler waits for it."""
        return None

    def wait_for_copies(self) -> None:
        """Return when no copy touches the engine's KV, which is about to be unmapped."""
        self._handover.opened.keep_off()

    def close(self) -> None:
        """Stop all copies; here the scheduler's half closes the cache."""


class UnderScheduler:
    """Obeys the scheduler in another process, which has the replica."""

    def __init__(self, rank: WorkerRank, fence_s: float, *, drafts_last: bool = False) -> None:
        """A copy that somebody waits for, and that has not ended after `fence_s`, fails.

        With `drafts_last` the drafter writes its KV after `begin_backups`; see `drafts_after_saves`.
        """
        self._rank = rank
        self._fence_s = fence_s
        self._drafts_last = drafts_last
        self._late = False
        """Whether backups of the step before wait for its drafter."""
        self._counts_due_s = 0.0
        self._obeyed: PassMetadata | None = None

    def obey(self, metadata: PassMetadata) -> None:
        # The engine may say it twice: before it overwrites blocks, and before the forward pass.
        if metadata is not self._obeyed:
            self._begin_late_backups()
            self._obeyed = metadata
            self._rank.obey(metadata.dispatch)

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
        """Return what this rank has counted: now and then, and in each step that computes nothing."""
        now = time.monotonic()
        if now < self._counts_due_s and (self._obeyed is None or self._obeyed.computes):
            return {}
        self._counts_due_s = now + TOLD_EVERY_S
        return {self._rank.rank: self._rank.executor.counts()}

    def _begin_late_backups(self) -> None:
        """Begin backups that waited for the drafter, before the next step adds others."""
        if self._late:
            self._late = False
            self._rank.begin_backups()


WorkerHalf: TypeAlias = BesideScheduler | UnderScheduler
