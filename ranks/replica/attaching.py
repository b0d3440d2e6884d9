"""Attach and detach while requests run: proposals that all ranks have staged become commands.

    DETACHED --attach--> ATTACHED --detach--> DRAINING --nothing in flight--> DETACHED

A proposal is pending from the first verdict that tells of it, and ends in the same step on every rank:
it is done, or it is withdrawn. To detach is to begin nothing new for the store and to abort what is in
flight, as every abort goes (QUIESCE). What is quarantined then stays with the old store, whose pages
come back if it ever falls quiet; it keeps no other store from being attached, until such stores keep
more than half of host memory.
"""

from enum import StrEnum

from ...coordinator.operation import Kind
from ...coordinator.proposal import Change, Readiness, change_of
from ...coordinator.verdict import Proposed
from ..orders import AttachStore, DetachStore
from .backing_up import BackingUp
from .prefetching import Prefetching
from .quarantine import stores_keep_most
from .state import Decision, ReplicaState


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


class Attaching:
    """Follows proposals, and attaches and detaches the store."""

    def __init__(
        self, state: ReplicaState, prefetching: Prefetching, backing_up: BackingUp
    ) -> None:
        self._state = state
        self._prefetching = prefetching
        self._backing_up = backing_up

    @property
    def store_state(self) -> StoreState:
        """How far the group is with its store."""
        state = self._state
        if state.store_attached:
            return StoreState.ATTACHED
        if state.store_draining:
            return StoreState.DRAINING
        pending = state.proposal
        if pending is not None and change_of(pending) is Change.ATTACH:
            return StoreState.ATTACHING
        return StoreState.DETACHED

    def consider(self, proposed: Proposed | None) -> None:
        """Apply what the ranks have staged: go on with it, carry it out, or withdraw it."""
        state = self._state
        self._end_draining()
        if proposed is None:
            state.proposal = None
            return
        if proposed.proposal != state.proposal:
            state.proposal, state.proposed_ms = proposed.proposal, state.time_ms
            state.journal.record("propose", proposed.proposal)
        objection = self._objection(proposed)
        if self._is_done_already(proposed):
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
                self._attach(proposed.proposal)
            else:
                self.detach()
                self._end_draining()
        elif state.time_ms - state.proposed_ms > state.config.timeouts.open_s * 1000:
            self._decide(Decision(proposed.proposal, self._tardiness(proposed)))

    def detach(self, *, keeps_too_much: bool = False) -> None:
        """Begin nothing more for the store, and abort what is in flight for it."""
        state = self._state
        if not state.store_attached:
            return
        state.store_attached, state.store_draining = False, True
        state.journal.record("detach", int(keeps_too_much))
        self._prefetching.abandon()
        self._backing_up.abandon()

    def _attach(self, proposal: int) -> None:
        state = self._state
        state.begin_store()
        state.journal.record("attach", state.store_number)
        state.orders.append(AttachStore(proposal))

    def _end_draining(self) -> None:
        """Let go of a store for which nothing is in flight but what never falls quiet."""
        state = self._state
        if not state.store_draining:
            return
        working = state.operations.working
        if working[Kind.PREFETCH] or working[Kind.PERSIST]:
            return
        state.store_draining = False
        state.journal.record("drained", state.store_number)
        state.orders.append(DetachStore())

    def _decide(self, decision: Decision) -> None:
        state = self._state
        state.proposal = None
        state.journal.record("decide", decision.proposal, decision.withdrawn)
        state.decisions.append(decision)

    def _must_wait(self, proposed: Proposed) -> bool:
        """Say whether the store before is still to be let go of."""
        return change_of(proposed.proposal) is Change.ATTACH and self._state.store_draining

    def _objection(self, proposed: Proposed) -> str | None:
        """Return why nothing can come of what is staged, or None."""
        if proposed.differs:
            return "the ranks were told to attach or detach different stores"
        if proposed.refused_rank is not None:
            return f"rank {proposed.refused_rank} cannot open it; its log says why"
        if change_of(proposed.proposal) is Change.DETACH:
            return None
        state = self._state
        if state.store_attached:
            return "a store is attached; detach it first"
        kept = stores_keep_most(state)
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
        return detaches and not self._state.store_attached

    def _tardiness(self, proposed: Proposed) -> str:
        within = f"within {self._state.config.timeouts.open_s:g} s (timeouts.open_s)"
        if proposed.readiness is Readiness.UNSTAGED:
            return f"not every rank was told of it {within}"
        if proposed.readiness is Readiness.READY:
            return f"the store before it was still draining {within}"
        return f"it was not ready on every rank {within}"
