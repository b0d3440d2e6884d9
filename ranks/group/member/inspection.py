"""A look at what stands behind a cache: for tests, for checkers, and for whoever hunts a fault."""

from collections.abc import Collection, Mapping

from ....coordinator.round import Rounds
from ....coordinator.seats import SeatTable
from ....errors import GroupError, InternalError
from ...executor.base import Executor
from ...protocol.replica_config import ReplicaConfig
from ...replica.attaching import StoreState
from ...replica.check import check
from ...replica.core.journal import Journal
from ...replica.digest import state_digest
from ...replica.operations.kinds import Operation
from ...replica.operations.requests import Requests
from ...replica.pinning import Pin
from ...replica.replica import Replica
from ...replica.tree.backlog import Undone
from ...replica.tree.node import Node
from ...replica.tree.prefixes import Prefixes


class Inspection:
    """What one rank's cache has come to, to be read only. No name here is promised to stay.

    Trees, requests and operations are the replica's own objects: whoever changes one makes this rank
    differ from the others, which ends the epoch.
    """

    def __init__(self, replica: Replica, rounds: Rounds, executor: Executor) -> None:
        self._replica = replica
        self._rounds = rounds
        self.executor = executor
        self.config: ReplicaConfig = replica.config
        """The settings and sizes that all ranks have agreed on."""
        self.journal: Journal = replica.journal
        """The last changes, in order."""
        self.requests: Requests = replica.requests
        self.prefixes: Prefixes = replica.prefixes
        """The cached prefixes, and where their pages are."""
        self.in_flight: Mapping[int, Operation] = replica.agenda.in_flight
        """The operations that have not ended, by id."""
        self.pins: Mapping[str, Pin] = replica.pinning.pins
        self.epoch, self.lanes = rounds.epoch, rounds.shape.length
        """The epoch that all ranks are in, and how many lanes the vector of each of its rounds has."""

    @property
    def digest(self) -> int:
        """The rolling digest of all changes, which each round compares."""
        return self._replica.digest

    @property
    def state_digest(self) -> int:
        """A digest of the whole replicated state, computed from nothing but the state; slow."""
        return state_digest(self._replica)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._replica.idle

    @property
    def lost(self) -> str | None:
        """Why the epoch has to end, or None."""
        return self._replica.lost

    @property
    def agreed_ms(self) -> int:
        """Agreed time."""
        return self._replica.clock.agreed_ms

    @property
    def store_state(self) -> StoreState:
        """How far the group is with its store."""
        return self._replica.store_state

    @property
    def stores(self) -> int:
        """How many stores there have been."""
        return self._replica.store.number

    def keeps(self, node: Node) -> bool:
        """Say whether what is cached at a node is to be written to the store."""
        return self._replica.persisting.keeps(node)

    def works(self, operation: int) -> bool:
        """Say whether an operation will end by itself: it is neither quarantined nor merely serves."""
        return self._replica.agenda.works(operation)

    @property
    def unwritten(self) -> Mapping[Undone, int]:
        """How many pages are not yet where the write policy wants them, by cause."""
        return self._replica.unwritten

    @property
    def misses(self) -> Collection[tuple[str, bytes]]:
        """Objects that could not be read a while ago, by pool and key."""
        return [name for name, _ in self._replica.store.misses.items()]

    @property
    def store_keeps_too_much(self) -> bool:
        """Whether operations of the present store, or the last one, keep more pages than they may."""
        return self._replica.quarantine.store_keeps_too_much()

    @property
    def seats(self) -> SeatTable:
        """The seats of prefetches in the next ballot."""
        return self._replica.seats()

    @property
    def rounds(self) -> int:
        """How many rounds were launched in this epoch."""
        return self._rounds.count

    @property
    def ended_by(self) -> GroupError | InternalError | None:
        """The error that has ended the epoch, or None."""
        return self._rounds.ended_by

    def touching(self, request: str) -> Collection[int]:
        """Return the ids of the copies that touch what a request lends."""
        return self._replica.touching(request)

    def check(self) -> None:
        """Raise `InvariantViolation` with a sentence for the first invariant that does not hold."""
        check(self._replica)
