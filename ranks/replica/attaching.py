"""Attach and detach while requests run: proposals that all ranks have staged become commands.

    DETACHED --attach--> ATTACHED --detach--> DRAINING --nothing in flight--> DETACHED or LOST

A proposal is pending from the first verdict that tells of it, and ends in the same step on every rank:
it is done, or it is withdrawn. To detach is to begin nothing new for the store and to abort what is in
flight, as every abort goes (QUIESCE). What is quarantined then stays with the old store, whose pages
come back if it ever falls quiet; it keeps no other store from being attached, until such stores keep
more than half of host memory.
"""

from enum import StrEnum

from ...coordinator.proposal import Change, Readiness, change_of
from ...coordinator.verdict import Proposed
from ..protocol.effects import Decision
from ..protocol.orders import AttachStore, DetachStore
from .core.basis import Basis
from .operations.agenda import Agenda
from .operations.persisting import Persisting
from .operations.quarantine import Quarantine
from .operations.store import Store
from .prefetch.prefetching import Prefetching


class StoreState(StrEnum):
    """How far the group is with its store; the same on every rank."""

    DETACHED = "detached"
    """There is none."""
    ATTACHING = "attaching"
    """There is none, and some rank has staged a proposal to attach one."""
    ATTACHED = "attached"
    """It is read and written."""
    DRAINING = "draining"
    """Nothing is begun for it any more, and something is still in flight."""
    LOST = "lost"
    """There is none: the group has let go of it by itself, because its calls did not come back."""


class Attaching:
    """Follows proposals, and attaches and detaches the store."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: Basis,
        agenda: Agenda,
        store: Store,
        prefetching: Prefetching,
        persisting: Persisting,
        quarantine: Quarantine,
    ) -> None:
        self._open_s = basis.config.timeouts.open_s
        self._clock = basis.clock
        self._agenda = agenda
        self._store = store
        self._prefetching = prefetching
        self._persisting = persisting
        self._quarantine = quarantine
        self._journal = basis.journal
        self._outbox = basis.outbox
        self.proposal: int | None = None
        """The digest of the proposal that some rank has staged, once a verdict has told of it."""
        self.proposed_ms = 0
        """When a verdict first told of the proposal, in agreed time."""

    @property
    def store_state(self) -> StoreState:
        """How far the group is with its store."""
        if self._store.attached:
            return StoreState.ATTACHED
        if self._store.draining:
            return StoreState.DRAINING
        if self.proposal is not None and change_of(self.proposal) is Change.ATTACH:
            return StoreState.ATTACHING
        return StoreState.LOST if self._store.lost else StoreState.DETACHED

    def consider(self, proposed: Proposed | None) -> None:
        """Apply what the ranks have staged: go on with it, carry it out, or withdraw it."""
        self._end_draining()
        if proposed is None:
            self.proposal = None
            return
        if proposed.proposal != self.proposal:
            self.proposal, self.proposed_ms = proposed.proposal, self._clock.agreed_ms
            self._journal.record("propose", proposed.proposal)
        objection = self._objection(proposed)
        if self._is_done_already(proposed):
            self._store.lost = False  # An operator goes on without it.
            self._decide(Decision(proposed.proposal))
        elif objection is not None:
            # Where they differ, whatever a rank has staged ends, whether it could be opened or not.
            told, refused = (
                (None, None) if proposed.differs else (proposed.proposal, proposed.refused_rank)
            )
            self._decide(Decision(told, objection, refused))
        elif proposed.readiness is Readiness.READY and not self._must_wait(proposed):
            self._decide(Decision(proposed.proposal))
            if change_of(proposed.proposal) is Change.ATTACH:
                self._store.attach(self._agenda.next_id)
                self._outbox.orders.append(AttachStore(proposed.proposal))
            else:
                self.detach()
                self._end_draining()
        elif self._clock.agreed_ms - self.proposed_ms > self._open_s * 1000:
            self._decide(Decision(proposed.proposal, self._tardiness(proposed)))

    def detach(self, reason: str = "") -> None:
        """Begin nothing more for the store, and abort what is in flight for it."""
        if self._store.attached:
            self._store.detach(reason)
            self._prefetching.abandon()
            self._persisting.abandon()

    def _end_draining(self) -> None:
        """Let go of a store for which nothing is in flight but what never falls quiet."""
        if self._store.draining and not self._agenda.working_for_store:
            self._store.drained()
            self._outbox.orders.append(DetachStore())

    def _decide(self, decision: Decision) -> None:
        self.proposal = None
        self._journal.record("decide", decision.proposal, decision.withdrawn)
        self._outbox.decisions.append(decision)

    def _must_wait(self, proposed: Proposed) -> bool:
        """Say whether the store before is still to be let go of."""
        return change_of(proposed.proposal) is Change.ATTACH and self._store.draining

    def _objection(self, proposed: Proposed) -> str | None:
        """Return why nothing can come of what is staged, or None."""
        if proposed.differs:
            return "the ranks were told to attach or detach different stores"
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
            f"stores that were let go of and do not end their calls keep {kept}; restore or restart"
            " those stores, or start the engine again"
        )

    def _is_done_already(self, proposed: Proposed) -> bool:
        """Say whether all that is staged is to detach, and there is nothing to detach from.

        A message that comes twice, or late to one rank, so keeps nothing else waiting.
        """
        detaches = change_of(proposed.proposal) is Change.DETACH and not proposed.differs
        return detaches and not self._store.attached

    def _tardiness(self, proposed: Proposed) -> str:
        within = f"within {self._open_s:g} s (timeouts.open_s)"
        if proposed.readiness is Readiness.UNSTAGED:
            return f"not every rank was told of it {within}"
        if proposed.readiness is Readiness.READY:
            return f"the store before it was still draining {within}"
        return f"it was not ready on every rank {within}"
