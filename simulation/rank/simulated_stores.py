"""Simulated opening and closing of a rank's stores, which takes time and may fail or hang."""

from collections.abc import Callable
from functools import partial

from ...coordinator.proposal import Change, Proposal, Readiness
from .conditions import Conditions
from .memory import SimulatedStore
from .stores import FIRST_STORE, OpenStore

_OPENING_US_MAX = 90_000


class SimulatedStores:
    """The store that one process uses, and the stores that it has staged for an attach proposal."""

    def __init__(self, store: SimulatedStore, conditions: Conditions) -> None:
        self.find: Callable[[str], SimulatedStore] = {FIRST_STORE: store}.__getitem__
        """Returns the simulated store at a URI."""
        self.refusals = 0.0
        """The chance that opening a staged store fails."""
        self.used = OpenStore(FIRST_STORE, store, conditions.find, conditions.rank)
        """The store in use. After a detach, this is the closed store that was used last."""
        self._conditions = conditions
        self._staged: dict[int, OpenStore] = {}
        self._readiness: dict[int, Readiness | str] = {}

    @property
    def in_use(self) -> str | None:
        return None if self.used.closed else self.used.uri

    def stage(self, proposal: Proposal) -> None:
        number = proposal.digest
        if proposal.change is Change.DETACH:
            self._readiness[number] = Readiness.READY
            return
        self._readiness[number] = Readiness.STAGED
        opened, rank = self.find(proposal.store), self._conditions.rank
        store = OpenStore(proposal.store, opened, self._conditions.find, rank)
        self._staged[number] = store
        draw = self._conditions.random.random()
        became = "nobody answers" if draw < self.refusals else Readiness.READY
        if draw >= self.refusals / 3:
            delay_us = self._conditions.random.randrange(_OPENING_US_MAX)
            self._conditions.plan(delay_us, partial(self._opened, number, store, became))

    def readiness(self, proposal: Proposal) -> Readiness | str:
        return self._readiness[proposal.digest]

    def unstage(self, proposal: Proposal) -> None:
        self._staged.pop(proposal.digest, None)

    def attach(self, proposal: int) -> None:
        if self._readiness.get(proposal) != Readiness.READY or not self.used.closed:
            what = "a store is attached that is not open, or beside another"
            self._conditions.find(f"rank {self._conditions.rank}: {what}")
        self.used = self._staged.pop(proposal)

    def detach(self) -> None:
        self.used.closed = True

    def _opened(self, proposal: int, store: OpenStore, became: Readiness | str) -> None:
        if self._staged.get(proposal) is store:
            self._readiness[proposal] = became
