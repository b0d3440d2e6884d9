"""Attach and detach the store while requests run.

    DETACHED --attach--> ATTACHED --detach--> DRAINING --nothing in flight--> DETACHED or LOST

A proposal (a request to attach or detach, staged by each rank) is pending from the first verdict that
reports it. It becomes a command, or is withdrawn, in the same step on every rank.

A detach starts no new I/O and aborts I/O in flight through QUIESCE. If that I/O never ends, its pages
stay in quarantine, counted against the detached store. A new store can be attached meanwhile, unless
detached stores keep more than half of a host pool in quarantine.
"""

from enum import StrEnum

from ...coordinator.proposal import Change, Readiness, change_of
from ...coordinator.verdict import Proposed
from ..protocol.effects import Decision
from ..protocol.orders import AttachStore, DetachStore
from .core.replica_parts import ReplicaParts
from .operations.operation_table import OperationTable
from .operations.persisting import Persisting
from .operations.quarantine import Quarantine
from .operations.store import Store
from .prefetch.prefetching import Prefetching


class StoreState(StrEnum):
    """The state of the group's store, equal on every rank."""

    DETACHED = "detached"
    """No store is attached."""
    ATTACHING = "attaching"
    """No store is attached, and some rank has staged a proposal to attach one."""
    ATTACHED = "attached"
    """A store is attached and in use."""
    DRAINING = "draining"
    """The store gets no new I/O, but still has I/O in flight."""
    LOST = "lost"
    """No store is attached: the group detached the last store, because calls to it did not return."""


class Attaching:
    """Attaches or detaches the store once all ranks have staged the same proposal."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: ReplicaParts,
        operation_table: OperationTable,
        store: Store,
        prefetching: Prefetching,
        persisting: Persisting,
        quarantine: Quarantine,
    ) -> None:
        self._open_s = basis.config.timeouts.open_s
        self._clock = basis.clock
        self._operation_table = operation_table
        self._store = store
        self._prefetching = prefetching
        self._persisting = persisting
        self._quarantine = quarantine
        self._journal = basis.journal
        self._outbox = basis.outbox
        self.proposal: int | None = None
        """The digest of the proposal that some rank has staged, as of the last verdict; None if no rank
        has staged one."""
        self.proposed_ms = 0
        """Agreed time (ms) of the first verdict that reported the proposal; its timeout starts then."""

    @property
    def store_state(self) -> StoreState:
        """The state of the group's store."""
        if self._store.attached:
            return StoreState.ATTACHED
        if self._store.draining:
            return StoreState.DRAINING
        if self.proposal is not None and change_of(self.proposal) is Change.ATTACH:
            return StoreState.ATTACHING
        return StoreState.LOST if self._store.lost else StoreState.DETACHED

    def consider(self, proposed: Proposed | None) -> None:
        """Apply a verdict about a staged proposal: track it, carry it out, or withdraw it.

        A proposal is withdrawn if ranks staged different ones, if a rank refused it, or if some rank is
        not ready within `timeouts.open_s`.
        """
        self._end_draining()
        if proposed is None:
            self.proposal = None
            return
        if proposed.proposal != self.proposal:
            self.proposal, self.proposed_ms = proposed.proposal, self._clock.agreed_ms
            self._journal.record("propose", proposed.proposal)
        objection = self._objection(proposed)
        if self._is_done_already(proposed):
            # A detach request after the group has lost its store means that the operator accepts the
            # loss. Change the state from LOST to DETACHED.
            self._store.lost = False
            self._decide(Decision(proposed.proposal))
        elif objection is not None:
            # If the ranks staged different proposals, withdraw all of them; the decision then names no
            # proposal.
            proposal, refused = (
                (None, None) if proposed.differs else (proposed.proposal, proposed.refused_rank)
            )
            self._decide(Decision(proposal, objection, refused))
        elif proposed.readiness is Readiness.READY and not self._must_wait(proposed):
            self._decide(Decision(proposed.proposal))
            if change_of(proposed.proposal) is Change.ATTACH:
                self._store.attach(self._operation_table.next_id)
                self._outbox.orders.append(AttachStore(proposed.proposal))
            else:
                self.detach()
                self._end_draining()
        elif self._clock.agreed_ms - self.proposed_ms > self._open_s * 1000:
            self._decide(Decision(proposed.proposal, self._tardiness(proposed)))

    def detach(self, reason: str = "") -> None:
        """Begin to detach the store: start no new I/O for it, and abort its I/O in flight."""
        if self._store.attached:
            self._store.detach(reason)
            self._prefetching.abandon()
            self._persisting.abandon()

    def _end_draining(self) -> None:
        """Finish a detach once the draining store has no I/O in flight other than quarantined I/O."""
        if self._store.draining and not self._operation_table.working_for_store:
            self._store.drained()
            self._outbox.orders.append(DetachStore())

    def _decide(self, decision: Decision) -> None:
        self.proposal = None
        self._journal.record("decide", decision.proposal, decision.withdrawn)
        self._outbox.decisions.append(decision)

    def _must_wait(self, proposed: Proposed) -> bool:
        return change_of(proposed.proposal) is Change.ATTACH and self._store.draining

    def _objection(self, proposed: Proposed) -> str | None:
        if proposed.differs:
            return "the ranks were asked to attach or detach different stores"
        if proposed.refused_rank is not None:
            return f"rank {proposed.refused_rank} cannot open it; its log says why"
        if change_of(proposed.proposal) is Change.DETACH:
            return None
        if self._store.attached:
            return "a store is attached; detach it first"
        kept = self._quarantine.stores_keep_most()
        if kept is None:
            return None
        return (
            f"calls of detached stores that do not return keep {kept}; restore or restart"
            " those stores, or restart the engine"
        )

    def _is_done_already(self, proposed: Proposed) -> bool:
        """Return whether the proposal is to detach a store although no store is attached.

        Such a proposal was sent twice, or reached one rank late. It is completed at once, so that it
        does not block other proposals.
        """
        detaches = change_of(proposed.proposal) is Change.DETACH and not proposed.differs
        return detaches and not self._store.attached

    def _tardiness(self, proposed: Proposed) -> str:
        within = f"within {self._open_s:g} s (timeouts.open_s)"
        if proposed.readiness is Readiness.UNSTAGED:
            return f"it did not reach every rank {within}"
        if proposed.readiness is Readiness.READY:
            return f"the previous store was still draining {within}"
        return f"it was not ready on every rank {within}"
