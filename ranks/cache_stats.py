"""The statistics of one rank's cache."""

from dataclasses import dataclass

from .executor.base import BytesMoved, LateCalls
from .replica.attaching import StoreState
from .tallies import ReplicaStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Statistics of one rank's cache since it was opened."""

    steps: int
    rounds: int
    transport: str
    """The name of the transport; after a colon the reason for it, where the group has chosen it."""
    collectives: int
    """Collectives that the transport has launched for rounds; equal to `steps`."""
    round_us: list[float]
    """For each of the last steps, how long it kept the engine, without the idle wait it asked for."""
    replica: ReplicaStats
    """Statistics of the replica; equal on all ranks."""
    bytes_moved: BytesMoved
    pages_corrupt: int
    """Pages whose bytes in storage were wrong; each was a miss."""
    storage_late: LateCalls
    """Calls to the store that timed out."""
    store: StoreState
    """How far the group is with its store; equal on all ranks."""
    digest: int
    """The digest of the replicated state; equal on all ranks."""

    @property
    def operations(self) -> dict[str, dict[str, int]]:
        """How many operations of each kind ended in each way."""
        return self.replica.operations
