"""The metrics of one rank's cache: one table, from which the port, the dashboard and the docs come.

Names and units follow the conventions of Prometheus: seconds and bytes, counters that end in `_total`
once they are exposed. Labels are few and bounded: no request, no namespace, no key.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

from ..ranks.executor.base import BytesMoved, LateCalls
from ..ranks.group.member.cache_stats import CacheStats
from ..ranks.protocol.orders import Direction
from ..ranks.replica.attaching import StoreState
from ..storage_backends.latencies import Histogram
from ..storage_backends.wrappers.metrics import CallMetrics, Metrics
from ..version import VERSION

PREFIX: Final = "lockstep_"


class Type(StrEnum):
    """What kind of number a metric is."""

    COUNTER = "counter"
    """Only grows, until the cache is opened again."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class ExecutorStats(Protocol):
    """The part of `CacheStats` that is about what one rank's executor has done."""

    @property
    def bytes_moved(self) -> BytesMoved:
        """See `CacheStats`."""
        ...

    @property
    def copies(self) -> Mapping[Direction, Histogram]:
        """See `CacheStats`."""
        ...

    @property
    def calls(self) -> Mapping[str, Metrics]:
        """See `CacheStats`."""
        ...

    @property
    def pages_corrupt(self) -> int:
        """See `CacheStats`."""
        ...

    @property
    def storage_late(self) -> LateCalls:
        """See `CacheStats`."""
        ...


Counted_contra = TypeVar("Counted_contra", contravariant=True)

Labels = tuple[str, ...]
"""The values of a family's labels, in their order."""
Sample = tuple[Labels, float | Histogram]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[Counted_contra]):
    """A metric with all of its samples. Each sample has the label `rank` as well."""

    name: str
    type: Type
    meaning: str
    labels: Labels = ()
    samples: Callable[[Counted_contra], Iterable[Sample]]

    @property
    def full_name(self) -> str:
        """The name as it is exposed, but for the endings of a histogram's parts."""
        return f"{PREFIX}{self.name}{'_total' if self.type is Type.COUNTER else ''}"


def _one(value: float) -> list[Sample]:
    return [((), value)]


def _by_one(counts: Mapping[str, int]) -> list[Sample]:
    return [((str(label),), count) for label, count in counts.items()]


def _by_two(counts: Mapping[str, Mapping[str, int]]) -> list[Sample]:
    return [
        ((str(first), str(second)), count)
        for first, seconds in counts.items()
        for second, count in seconds.items()
    ]


def _info(stats: CacheStats) -> list[Sample]:
    transport = stats.transport.partition(":")[0]
    return [((VERSION, transport, str(stats.world_size)), 1)]


def _up(stats: CacheStats) -> list[Sample]:
    return [((stats.ended_by,), int(not stats.ended_by))]


def _store_state(stats: CacheStats) -> list[Sample]:
    return [((state.value,), int(stats.store is state)) for state in StoreState]


def _pool_pages(stats: CacheStats) -> Iterator[Sample]:
    for pool, tiers in stats.pools.items():
        for tier, use in tiers.items():
            own = use.pages - use.free - use.cached
            yield (pool, tier.value, "free"), use.free
            yield (pool, tier.value, "evictable"), use.cached - use.held
            yield (pool, tier.value, "held"), use.held
            yield (pool, tier.value, "own"), own


def _moved(stats: ExecutorStats) -> list[Sample]:
    moved = stats.bytes_moved
    return [
        (("device", "host"), moved.l1_to_l2),
        (("host", "device"), moved.l2_to_l1),
        (("host", "storage"), moved.l2_to_l3),
        (("storage", "host"), moved.l3_to_l2),
    ]


def _copies(stats: ExecutorStats) -> list[Sample]:
    ways = {Direction.TO_HOST: ("device", "host"), Direction.TO_DEVICE: ("host", "device")}
    return [(ways[direction], took) for direction, took in stats.copies.items()]


def _calls(stats: ExecutorStats, of: Callable[[CallMetrics], float | Histogram]) -> list[Sample]:
    return [
        ((store, call.value), of(seen))
        for store, calls in stats.calls.items()
        for call, seen in calls.items()
    ]


def _keys(stats: ExecutorStats) -> list[Sample]:
    return [
        ((store, call.value, outcome), count)
        for store, calls in stats.calls.items()
        for call, seen in calls.items()
        for outcome, count in seen.outcomes.items()
    ]


_COUNTER, _GAUGE, _HISTOGRAM = Type.COUNTER, Type.GAUGE, Type.HISTOGRAM

_GROUP: Final[tuple[Family[CacheStats], ...]] = (
    Family(
        name="info",
        type=_GAUGE,
        meaning="1, with the version, what carries the rounds, and how many ranks there are.",
        labels=("version", "transport", "world_size"),
        samples=_info,
    ),
    Family(
        name="group_up",
        type=_GAUGE,
        meaning="1 while the group can agree; 0 once its epoch has ended, with the error's name.",
        labels=("ended_by",),
        samples=_up,
    ),
    Family(
        name="rounds",
        type=_COUNTER,
        meaning="Rounds, each of which is one collective.",
        samples=lambda stats: _one(stats.rounds),
    ),
    Family(
        name="step_seconds",
        type=_HISTOGRAM,
        meaning="How long the cache kept the engine in a step.",
        samples=lambda stats: [((), stats.steps_took)],
    ),
    Family(
        name="round_wait_seconds",
        type=_COUNTER,
        meaning="How long this rank has waited for the others in its rounds; the rank that all wait for"
        " has the least.",
        samples=lambda stats: _one(stats.waited_s),
    ),
)
_HITS: Final[tuple[Family[CacheStats], ...]] = (
    Family(
        name="admissions",
        type=_COUNTER,
        meaning="Requests that were admitted.",
        samples=lambda stats: _one(stats.replica.admissions),
    ),
    Family(
        name="asked_tokens",
        type=_COUNTER,
        meaning="Tokens that admitted requests could have used from the cache.",
        samples=lambda stats: _one(stats.replica.asked_tokens),
    ),
    Family(
        name="hit_tokens",
        type=_COUNTER,
        meaning="How many of them were cached, by the tier on which they were.",
        labels=("tier",),
        samples=lambda stats: _by_one(stats.replica.hit_tokens),
    ),
    Family(
        name="missed_pages",
        type=_COUNTER,
        meaning="Pages that prefetches asked for and did not bring, by the reason.",
        labels=("reason",),
        samples=lambda stats: _by_one(stats.replica.missed_pages),
    ),
    Family(
        name="lacking",
        type=_COUNTER,
        meaning="How often a rank could not do what the others could have done.",
        labels=("lacking_rank",),
        samples=lambda stats: [((str(rank),), n) for rank, n in stats.replica.lacking.items()],
    ),
    Family(
        name="namespaces",
        type=_GAUGE,
        meaning="Namespaces, which salts make, of which something is cached or requested.",
        samples=lambda stats: _one(stats.namespaces),
    ),
    Family(
        name="namespaces_begun",
        type=_COUNTER,
        meaning="How often a namespace had nothing and got something.",
        samples=lambda stats: _one(stats.namespaces_begun),
    ),
)
_PAGES: Final[tuple[Family[CacheStats], ...]] = (
    Family(
        name="pool_pages",
        type=_GAUGE,
        meaning="Pages of a pool on a tier: free; cached and evictable; cached and held by requests,"
        " pins and operations; or requests' and operations' own.",
        labels=("pool", "tier", "state"),
        samples=_pool_pages,
    ),
    Family(
        name="stored_pages",
        type=_COUNTER,
        meaning="Pages that came to a tier, by cause.",
        labels=("tier", "cause"),
        samples=lambda stats: _by_two(stats.replica.stored_pages),
    ),
    Family(
        name="removed_pages",
        type=_COUNTER,
        meaning="Pages that left a tier, by cause: room is eviction, limit a namespace's quota.",
        labels=("tier", "cause"),
        samples=lambda stats: _by_two(stats.replica.removed_pages),
    ),
)
_OPERATIONS: Final[tuple[Family[CacheStats], ...]] = (
    Family(
        name="operations",
        type=_COUNTER,
        meaning="Operations that have ended, and how.",
        labels=("kind", "outcome"),
        samples=lambda stats: _by_two(stats.replica.operations),
    ),
    Family(
        name="operations_in_flight",
        type=_GAUGE,
        meaning="Operations that have not ended.",
        labels=("kind",),
        samples=lambda stats: _by_one(stats.in_flight),
    ),
    Family(
        name="unwritten_pages",
        type=_GAUGE,
        meaning="Pages that are still to be copied to host memory or written to the store, by what"
        " keeps them from it.",
        labels=("cause",),
        samples=lambda stats: _by_one(stats.unwritten_pages),
    ),
    Family(
        name="left_unwritten_pages",
        type=_COUNTER,
        meaning="Pages that have left memory before they could be copied or written.",
        labels=("cause",),
        samples=lambda stats: _by_one(stats.left_unwritten_pages),
    ),
    Family(
        name="quarantined_operations",
        type=_COUNTER,
        meaning="Operations that did not fall quiet in time: their pages are out of use.",
        samples=lambda stats: _one(stats.replica.quarantined),
    ),
)
_COPIES: Final[tuple[Family[ExecutorStats], ...]] = (
    Family(
        name="moved_bytes",
        type=_COUNTER,
        meaning="Bytes that this rank has moved between tiers.",
        labels=("source", "destination"),
        samples=_moved,
    ),
    Family(
        name="copy_seconds",
        type=_HISTOGRAM,
        meaning="How long copies took, from when they began until the step that heard of their end.",
        labels=("source", "destination"),
        samples=_copies,
    ),
)
_STORE: Final[tuple[Family[CacheStats], ...]] = (
    Family(
        name="store_state",
        type=_GAUGE,
        meaning="1 for the state that the group's store is in, 0 for the others.",
        labels=("state",),
        samples=_store_state,
    ),
)
_STORAGE: Final[tuple[Family[ExecutorStats], ...]] = (
    Family(
        name="storage_keys",
        type=_COUNTER,
        meaning="Keys that stores were asked for, by what became of them.",
        labels=("store", "call", "outcome"),
        samples=_keys,
    ),
    Family(
        name="storage_bytes",
        type=_COUNTER,
        meaning="Bytes read from stores and written to them.",
        labels=("store", "call"),
        samples=lambda stats: _calls(stats, lambda seen: seen.nbytes),
    ),
    Family(
        name="storage_call_seconds",
        type=_HISTOGRAM,
        meaning="How long calls to stores took.",
        labels=("store", "call"),
        samples=lambda stats: _calls(stats, lambda seen: seen.took),
    ),
    Family(
        name="storage_calls_in_flight",
        type=_GAUGE,
        meaning="Calls to stores that have not returned.",
        labels=("store", "call"),
        samples=lambda stats: _calls(stats, lambda seen: seen.in_flight),
    ),
    Family(
        name="storage_calls_interrupted",
        type=_COUNTER,
        meaning="Calls to stores that were cancelled, or raised.",
        labels=("store", "call"),
        samples=lambda stats: _calls(stats, lambda seen: seen.interrupted),
    ),
    Family(
        name="storage_late_calls",
        type=_COUNTER,
        meaning="Calls to stores that ran out of their time.",
        samples=lambda stats: _one(stats.storage_late.calls),
    ),
    Family(
        name="corrupt_pages",
        type=_COUNTER,
        meaning="Pages read from stores whose bytes were wrong; each was a miss.",
        samples=lambda stats: _one(stats.pages_corrupt),
    ),
)

GROUP_FAMILIES: Final = (*_GROUP, *_HITS, *_PAGES, *_OPERATIONS, *_STORE)
"""What a cache counts itself."""

EXECUTOR_FAMILIES: Final = (*_COPIES, *_STORAGE)
"""What its executor counts, which may be elsewhere than the rest of the cache."""

FAMILIES: Final[tuple[Family[CacheStats], ...]] = (
    *_GROUP,
    *_HITS,
    *_PAGES,
    *_OPERATIONS,
    *_COPIES,
    *_STORE,
    *_STORAGE,
)
"""All metrics, in the order in which they are exposed."""
