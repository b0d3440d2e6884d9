"""The statistics of one rank's cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from ....storage_backends.latencies import Histogram
from ...executor.base import ExecutorCounts
from ...protocol.notices import Tier
from ...replica.attaching import StoreState
from ...replica.tree.prefixes import Prefixes

Counts = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Statistics of the replica since the cache was opened; equal on all ranks."""

    operations: Counts
    """How many operations of each kind ended in each way. `no_room` counts what was not begun, too."""
    admissions: int
    """How often a request was admitted."""
    asked_tokens: int
    """How many tokens admitted requests could have used from the cache."""
    hit_tokens: dict[str, int]
    """How many of those were cached, by the tier on which they were: device, host, storage or peer."""
    missed_tokens: dict[str, int]
    """How many of those were not, by the cause: see `MissedTokens`."""
    missed_pages: dict[str, int]
    """Pages that prefetches asked for and did not bring, by reason."""
    stored_pages: Counts
    """Pages that came to a tier, by cause."""
    removed_pages: Counts
    """Pages that left a tier, by cause."""
    lacking: dict[int, int]
    """How often a rank's store lacked a page that the others' have."""
    quarantined: int
    """How many operations did not fall quiet in time, whether or not they have since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """How the pages of one pool on one tier are used; equal on all ranks."""

    pages: int
    """How many there are."""
    free: int
    """Pages that nobody owns."""
    cached: int
    """Pages of cached prefixes. The rest is the requests' and the operations' own."""
    held: int
    """Those of them that running requests, pins and operations keep from being evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats(ExecutorCounts):
    """Statistics of one rank's cache and executor since they were opened.

    `dataclasses.asdict` makes JSON of them.
    """

    rank: int
    world_size: int
    steps: int
    rounds: int
    transport: str
    """The name of the transport; after a colon the reason for it, where the group has chosen it."""
    collectives: int
    """Collectives that the transport has launched for rounds; equal to `steps`."""
    round_us: list[float]
    """For each of the last steps, how long it kept the engine, without the idle wait it asked for."""
    steps_took: Histogram
    """The same for all steps."""
    waited_s: float
    """How long this rank has waited in its rounds for the others: the rank that all wait for has the
    least."""
    replica: ReplicaStats
    """Statistics of the replica; equal on all ranks."""
    pools: Mapping[str, Mapping[Tier, PoolUse]]
    """How full each pool is, by its name and tier; equal on all ranks."""
    in_flight: Mapping[str, int]
    """Operations in flight, by their kind; equal on all ranks."""
    quarantined: int
    """How many of them were stopped and do not fall quiet: their pages are out of use."""
    unwritten_pages: Mapping[str, int]
    """Pages that are still to be copied to host memory or written to the store, by the cause of the
    delay; equal on all ranks."""
    left_unwritten_pages: Mapping[str, int]
    """Pages that have left memory before that could be done; equal on all ranks."""
    namespaces: int
    """Namespaces, which salts make, of which something is cached or requests are known."""
    namespaces_begun: int
    """How often a namespace had nothing and got something: with salts that never come back it grows
    as requests do."""
    store: StoreState
    """How far the group is with its store; equal on all ranks."""
    stores: int
    """How many stores it has had."""
    ended_by: str
    """The name of the error that has ended the epoch, or nothing while it lasts."""
    digest: int
    """The digest of the replicated state; equal on all ranks."""
    workers: Mapping[int, ExecutorCounts] | None = None
    """Where one replica decides for workers elsewhere: what each of them has last told, by rank."""

    @property
    def operations(self) -> dict[str, dict[str, int]]:
        """How many operations of each kind ended in each way."""
        return self.replica.operations


def pools_in_use(prefixes: Prefixes) -> dict[str, dict[Tier, PoolUse]]:
    """Return how full each pool is, by its name and tier. Any thread may ask."""
    residence = prefixes.residence
    kept = residence.holds.kept_pages
    return {
        each.pool: {
            tier: PoolUse(
                pages=residence.pools[index][each.index].capacity,
                free=residence.pools[index][each.index].free,
                cached=residence.tree_pages[index][each.index],
                held=kept[index][each.index],
            )
            for index, tier in enumerate((Tier.DEVICE, Tier.HOST))
        }
        for each in prefixes.components
    }
