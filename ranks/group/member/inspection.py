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
        self._executor = executor

    @property
    def executor(self) -> Executor:
        """The executor: its pools, and what it has counted."""
        return self._executor

    @property
    def config(self) -> ReplicaConfig:
        """The settings and sizes that all ranks have agreed on."""
        return self._replica.config

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

    @property
    def in_flight(self) -> Mapping[int, Operation]:
        """The operations that have not ended, by id."""
        return self._replica.agenda.in_flight

    def works(self, operation: int) -> bool:
        """Say whether an operation will end by itself: it is neither quarantined nor merely serves."""
        return self._replica.agenda.works(operation)

    @property
    def unwritten(self) -> Mapping[Undone, int]:
        """How many pages are not yet where the write policy wants them, by cause."""
        return self._replica.unwritten

    @property
    def requests(self) -> Requests:
        """The requests that are known."""
        return self._replica.requests

    @property
    def prefixes(self) -> Prefixes:
        """The cached prefixes, and where their pages are."""
        return self._replica.prefixes

    @property
    def pins(self) -> Mapping[str, Pin]:
        """The pins by name."""
        return self._replica.pinning.pins

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
    def journal(self) -> Journal:
        """The last changes, in order."""
        return self._replica.journal

    @property
    def rounds(self) -> int:
        """How many rounds were launched in this epoch."""
        return self._rounds.count

    @property
    def round_pending(self) -> bool:
        """Whether a round was launched whose verdict is not applied yet."""
        return self._rounds.pending

    @property
    def ended_by(self) -> GroupError | InternalError | None:
        """The error that has ended the epoch, or None."""
        return self._rounds.ended_by

    @property
    def epoch(self) -> int:
        """The epoch that all ranks are in."""
        return self._rounds.epoch

    @property
    def lanes(self) -> int:
        """How many lanes the vector of each round has."""
        return self._rounds.shape.length

    def touching(self, request: str) -> Collection[int]:
        """Return the ids of the copies that touch what a request lends."""
        return self._replica.touching(request)

    def check(self) -> None:
        """Raise `InvariantViolation` with a sentence for the first invariant that does not hold."""
        check(self._replica)
