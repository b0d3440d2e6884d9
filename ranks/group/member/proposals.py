"""Proposals on this rank: any thread may stage one, and verdicts decide on it.

The engine's thread votes on the staged proposal in each round and completes its future with the
decision. A lock protects the state. The longest work done under the lock is the start of a thread or
the first import of a module.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import RLock

from ....coordinator.proposal import NOTHING_STAGED, Change, Proposal, Readiness, StagedLanes
from ....errors import LockstepError, StorageError, UsageError
from ....storage_backends.uri import without_secrets
from ...executor.base import Executor
from ...protocol.effects import Decision

log = logging.getLogger("lockstep")


@dataclass(slots=True, eq=False)
class _StagedProposal:
    """A staged proposal and the future of its result."""

    proposal: Proposal
    outcome: "Future[None]" = field(default_factory=Future[None])
    refusal: str | None = None
    """The reason why this rank cannot accept the proposal; None if there is no objection."""


class StagedProposals:
    """The proposal staged on this rank, at most one at a time."""

    def __init__(self, rank: int, executor: Executor) -> None:
        self._rank = rank
        self._executor = executor
        # Use a reentrant lock, because a signal handler of the thread that holds the lock may close the
        # cache.
        self._lock = RLock()
        self._pending: _StagedProposal | None = None
        self._closed_by: LockstepError | None = None

    def stage(self, proposal: Proposal) -> "Future[None]":
        """Stage a proposal and return its future at once, from any thread.

        See `RankCache.attach_store`.
        """
        with self._lock:
            if self._closed_by is not None:
                # Drop the traceback, because the same error object is raised repeatedly and would
                # gather tracebacks.
                raise self._closed_by.with_traceback(None)
            pending = self._pending
            if pending is not None and pending.proposal != proposal:
                raise UsageError(
                    f"the proposal to {_words(pending.proposal)} is not decided yet on this rank;"
                    " wait for it"
                )
            if pending is None:
                self._executor.stage(proposal)
                pending = self._pending = _StagedProposal(proposal)
                # Mark the future as running, so that it cannot be cancelled: other ranks may already
                # have voted.
                pending.outcome.set_running_or_notify_cancel()
            return pending.outcome

    def vote(self) -> StagedLanes:
        """Return this rank's vote on the staged proposal for the next ballot."""
        pending = self._pending
        if pending is None:
            return NOTHING_STAGED
        with self._lock:
            if pending is not self._pending:
                return NOTHING_STAGED
            readiness = self._executor.readiness(pending.proposal)
            if isinstance(readiness, str):
                if pending.refusal is None:
                    log.error(
                        "rank %d cannot %s: %s", self._rank, _words(pending.proposal), readiness
                    )
                pending.refusal, readiness = readiness, Readiness.REFUSED
            return StagedLanes(pending.proposal.digest, readiness)

    def decide(self, decisions: Sequence[Decision]) -> None:
        """Finish the staged proposal as the ranks have decided."""
        for decision in decisions:
            with self._lock:
                pending = self._pending
                if pending is None or decision.proposal not in (None, pending.proposal.digest):
                    continue
                self.end(unstages=decision.withdrawn is not None)
            self._resolve(pending, decision)

    def end(self, *, unstages: bool) -> None:
        """Clear the staged proposal. If `unstages`, the executor discards the proposal's store."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None and unstages:
                self._executor.unstage(pending.proposal)

    def close(self, error: LockstepError) -> None:
        """Refuse all further proposals with `error`, because the group has ended."""
        with self._lock:
            self._closed_by = self._closed_by or error
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.outcome.set_exception(error)

    def _resolve(self, pending: _StagedProposal, decision: Decision) -> None:
        words = _words(pending.proposal)
        if decision.withdrawn is None:
            log.info("rank %d: all ranks agree to %s", self._rank, words)
            pending.outcome.set_result(None)
            return
        why = decision.withdrawn
        if pending.refusal is not None:
            own = f"rank {self._rank} cannot open it: {pending.refusal}"
            why = own if decision.refused_rank == self._rank else f"{own}; {why}"
        log.warning("rank %d: the proposal to %s is withdrawn: %s", self._rank, words, why)
        pending.outcome.set_exception(StorageError(f"could not {words}: {why}"))


def _words(proposal: Proposal) -> str:
    if proposal.change is Change.ATTACH:
        return f"attach store {without_secrets(proposal.store)!r}"
    return "detach the store"
