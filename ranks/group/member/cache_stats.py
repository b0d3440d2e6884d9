"""Statistics of one rank's cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from ....storage_backends.latencies import Histogram
from ...executor.base import ExecutorCounts
from ...protocol.events import Tier
from ...replica.attaching import StoreState
from ...replica.tree.prefixes import Prefixes

Counts = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Statistics of the replica since the cache was opened; equal on all ranks."""

    operations: Counts
    """Number of operations by kind and outcome. `no_room` also counts operations that were never
    started because memory or a queue was full."""
    admissions: int
    asked_tokens: int
    """Number of tokens that admitted requests asked the cache for, cached or not."""
    hit_tokens: dict[str, int]
    """Number of tokens of admitted requests that were cached, by tier: device, host, storage or peer.
    """
    missed_tokens: dict[str, int]
    """Number of tokens of admitted requests that were not cached, by cause (see `MissedTokens`)."""
    missed_pages: dict[str, int]
    """Number of pages that prefetches requested but did not deliver, by reason."""
    stored_pages: Counts
    """Number of pages added to a tier, by cause."""
    removed_pages: Counts
    """Number of pages removed from a tier, by cause."""
    lacking: dict[int, int]
    """Number of prefetches cut short because a rank's store lacked a page that another rank's store
    has. The keys are the ranks whose stores lacked the page."""
    quarantined: int
    """Number of operations whose I/O outlasted its deadline, including those that finished later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Usage of one pool's pages on one tier; equal on all ranks."""

    pages: int
    free: int
    cached: int
    """Number of pages with cached prefixes. Pages neither cached nor free belong to requests and
    operations."""
    held: int
    """Number of cached pages that running requests, pins and operations protect from eviction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats(ExecutorCounts):
    """Statistics of one rank's cache and executor since they were opened.

    `dataclasses.asdict` converts them to JSON values.
    """

    rank: int
    world_size: int
    steps: int
    rounds: int
    transport: str
    """Name of the rounds' transport. If the group chose it automatically, a colon and the reason
    follow."""
    collectives: int
    """Number of collectives launched for rounds; equal to `steps`."""
    round_us: list[float]
    """Microseconds that each of the last steps blocked the engine, without the wait that the engine
    requested by `idle_s`."""
    steps_took: Histogram
    """Histogram, over all steps, of the time that a step blocked the engine."""
    waited_s: float
    """Total seconds that this rank waited for other ranks in rounds. The rank with the smallest value
    is the slowest."""
    replica: ReplicaStats
    pools: Mapping[str, Mapping[Tier, PoolUse]]
    """Usage of each pool, by pool name and tier; equal on all ranks."""
    in_flight: Mapping[str, int]
    """Number of operations in flight by kind; equal on all ranks."""
    quarantined: int
    """Number of operations in flight that are quarantined."""
    unwritten_pages: Mapping[str, int]
    """Number of pages that still have to be backed up or persisted under the write policy, by the cause
    of the delay; equal on all ranks."""
    left_unwritten_pages: Mapping[str, int]
    """Number of pages evicted before they could be backed up or persisted, by cause; equal on all
    ranks."""
    namespaces: int
    """Number of namespaces with cached pages or requests. Each cache salt creates a namespace."""
    namespaces_begun: int
    """Number of times that an empty namespace got its first page. If every request has a new cache
    salt, the number grows with every request."""
    store: StoreState
    """State of the attached store; equal on all ranks."""
    stores: int
    """Number of stores attached so far."""
    ended_by: str
    """The name of the error that ended the epoch; empty while the epoch lasts."""
    digest: int
    """The digest of the replicated state; equal on all ranks."""
    workers: Mapping[int, ExecutorCounts] | None = None
    """In one-scheduler mode: each worker's executor counters as last received, by rank; otherwise None.
    """

    @property
    def operations(self) -> dict[str, dict[str, int]]:
        """Number of operations by kind and outcome."""
        return self.replica.operations


def pools_in_use(prefixes: Prefixes) -> dict[str, dict[Tier, PoolUse]]:
    """Return the usage of each pool, by name and tier. For any thread."""
    allocator = prefixes.allocator
    kept = allocator.ref_counts.kept_pages
    return {
        each.pool: {
            tier: PoolUse(
                pages=allocator.pools[index][each.index].capacity,
                free=allocator.pools[index][each.index].free,
                cached=allocator.tree_pages[index][each.index],
                held=kept[index][each.index],
            )
            for index, tier in enumerate((Tier.DEVICE, Tier.HOST))
        }
        for each in prefixes.components
    }
