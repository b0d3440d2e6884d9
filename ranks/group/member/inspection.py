"""Read-only access to a cache's internals, for tests, checkers and debugging."""

from collections.abc import Collection, Mapping

from ....coordinator.prefetch_slots import PrefetchSlotTable
from ....coordinator.round import Rounds
from ....errors import GroupError, InternalError
from ...executor.base import Executor
from ...protocol.replica_config import ReplicaConfig
from ...replica.attaching import StoreState
from ...replica.check import check
from ...replica.core.journal import Journal
from ...replica.digest import state_digest
from ...replica.operations.kinds import Operation
from ...replica.operations.requests import Requests
from ...replica.pinning import PinnedPrefix
from ...replica.replica import Replica
from ...replica.tree.backlog import Undone
from ...replica.tree.node import Node
from ...replica.tree.prefixes import Prefixes


class Inspection:
    """The internals of one rank's cache, read-only. Names may change between releases.

    Trees, requests and operations are the replica's objects. Modifying one makes this rank diverge,
    which ends the epoch.
    """

    def __init__(self, replica: Replica, rounds: Rounds, executor: Executor) -> None:
        self._replica = replica
        self._rounds = rounds
        self.executor = executor
        self.config: ReplicaConfig = replica.config
        """The replica's settings, with the sizes that all ranks agreed on."""
        self.journal: Journal = replica.journal
        self.requests: Requests = replica.requests
        self.prefixes: Prefixes = replica.prefixes
        """The cached prefixes and the locations of their pages."""
        self.in_flight: Mapping[int, Operation] = replica.operation_table.in_flight
        self.pins: Mapping[str, PinnedPrefix] = replica.pinning.pins
        self.epoch, self.lanes = rounds.epoch, rounds.shape.length
        """(epoch, lanes): the epoch, equal on all ranks, and the number of lanes of each round's
        vector."""

    @property
    def digest(self) -> int:
        """The rolling digest of all changes to the replica, compared between ranks in each round."""
        return self._replica.digest

    @property
    def state_digest(self) -> int:
        """A digest of the whole replicated state, computed from the state alone. Slow."""
        return state_digest(self._replica)

    @property
    def idle(self) -> bool:
        """Whether no retry is due, and only quarantined or serving operations are in flight."""
        return self._replica.idle

    @property
    def lost(self) -> str | None:
        """The reason why the replica ends the epoch; None while the epoch can go on."""
        return self._replica.lost

    @property
    def agreed_ms(self) -> int:
        """Agreed time in milliseconds: the time by a clock that is equal on all ranks."""
        return self._replica.clock.agreed_ms

    @property
    def store_state(self) -> StoreState:
        """The state of the group's store."""
        return self._replica.store_state

    @property
    def stores(self) -> int:
        """Number of stores attached so far."""
        return self._replica.store.number

    def keeps(self, node: Node) -> bool:
        """Return whether a node's pages are to be written to the store."""
        return self._replica.persisting.keeps(node)

    def works(self, operation: int) -> bool:
        """Return whether an operation can finish by itself: neither quarantined nor serving pages."""
        return self._replica.operation_table.works(operation)

    @property
    def unwritten(self) -> Mapping[Undone, int]:
        """Number of pages still to be backed up or persisted under the write policy, by cause."""
        return self._replica.unwritten

    @property
    def misses(self) -> Collection[tuple[str, bytes]]:
        """(pool, key) of each object that the replica remembers as unreadable."""
        return [name for name, _ in self._replica.store.misses.items()]

    @property
    def store_keeps_too_much(self) -> bool:
        """Whether quarantined operations of the attached (or last) store hold too many host pages."""
        return self._replica.quarantine.store_keeps_too_much()

    @property
    def prefetch_slots(self) -> PrefetchSlotTable:
        """The assignment of prefetches to the ballot's prefetch lanes in the next round."""
        return self._replica.prefetch_slots()

    @property
    def rounds(self) -> int:
        """Number of rounds launched in this epoch."""
        return self._rounds.count

    @property
    def ended_by(self) -> GroupError | InternalError | None:
        """The error that ended the epoch, or None."""
        return self._rounds.ended_by

    def touching(self, request: str) -> Collection[int]:
        """Return the ids of copies that touch a request's engine-owned device pages."""
        return self._replica.touching(request)

    def check(self) -> None:
        """Raise `InvariantViolation` that describes the first invariant that does not hold."""
        check(self._replica)
