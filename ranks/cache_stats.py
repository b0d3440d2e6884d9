"""What one rank tells of its cache."""

from dataclasses import dataclass

from .executor.base import BytesMoved, LateCalls
from .replica.attaching import StoreState
from .tallies import ReplicaStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What one rank's cache has done since it was opened."""

    steps: int
    rounds: int
    transport: str
    """What carries the rounds, and why it does if that was chosen."""
    collectives: int
    """Launched by the transport for rounds; equal to `steps`."""
    round_us: list[float]
    """For each of the last steps, how long it kept the engine, without the idle wait it asked for."""
    replica: ReplicaStats
    """What has happened in the cache, equal on all ranks."""
    bytes_moved: BytesMoved
    pages_corrupt: int
    """Pages whose bytes in storage were wrong; each was a miss."""
    storage_late: LateCalls
    """Calls to the store that timed out."""
    store: StoreState
    """Equal on all ranks, as is the next."""
    digest: int
    """Of the replicated state."""

    @property
    def operations(self) -> dict[str, dict[str, int]]:
        """How many operations of each kind ended in each way."""
        return self.replica.operations
