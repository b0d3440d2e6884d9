"""The metrics of one rank's cache: one table for the metrics port, the dashboard and the docs.

Names and units follow the conventions of Prometheus: seconds and bytes, and counters that end in
`_total` when exposed. Labels have few values: no request, namespace or key is a label.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from ..ranks.executor.base import ExecutorCounts
from ..ranks.group.member.cache_stats import CacheStats
from ..ranks.protocol.events import MissReason
from ..ranks.protocol.timed_events import WAYS
from ..ranks.replica.attaching import StoreState
from ..storage_backends.latencies import Histogram
from ..storage_backends.wrappers.metrics import CallMetrics
from ..version import VERSION

PREFIX: Final = "lockstep_"


class Type(StrEnum):
    """The types of metrics."""

    COUNTER = "counter"
    """A counter only increases, until the cache is opened again."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Counted_contra = TypeVar("Counted_contra", contravariant=True)

Labels = tuple[str, ...]
"""The values of a metric's labels, in the order of the label names."""
Number = float | Histogram
Nested = Number | Mapping[Any, "Nested"]
"""The values of a metric: a number, or a mapping from values of the first label to numbers. With more
labels, the values of the mapping are mappings whose keys are values of the next label."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Counted_contra]):
    """A metric with all of its samples. Each sample also has the label `rank`."""

    name: str
    labels: Labels
    type: Type
    read: Callable[[Counted_contra], Nested]
    meaning: str
    from_zero: tuple[str, ...] = ()
    """Values of the metric's only label for which the metric is exposed as 0 until something is
    counted.

    Otherwise the first sample of a counter could be above 0. Prometheus would see no increase, and no
    alert would fire.
    """

    @property
    def full_name(self) -> str:
        """The name under which the metric is exposed.

        A histogram's series add suffixes to this name.
        """
        return f"{PREFIX}{self.name}{'_total' if self.type is Type.COUNTER else ''}"

    def samples(self, counted: Counted_contra) -> Iterator[tuple[Labels, Number]]:
        """Return the metric's samples in the statistics `counted`, each with its label values."""
        read = self.read(counted)
        if isinstance(read, Mapping):
            read = {**dict.fromkeys(self.from_zero, 0), **read}
        return _flat(read, ())

    def zeros(self) -> Iterator[Labels]:
        """Yield the label values that a counter exposes with 0 before anything is counted."""
        if self.type is Type.COUNTER:
            yield from ((each,) for each in self.from_zero) if self.labels else ((),)


def _flat(nested: Nested, labels: Labels) -> Iterator[tuple[Labels, Number]]:
    if isinstance(nested, Mapping):
        for label, each in nested.items():
            yield from _flat(each, (*labels, str(label)))
    else:
        yield labels, nested


def _pool_pages(stats: CacheStats) -> Nested:
    return {
        pool: {
            tier: {
                "free": use.free,
                "evictable": use.cached - use.held,
                "held": use.held,
                "own": use.pages - use.free - use.cached,
            }
            for tier, use in tiers.items()
        }
        for pool, tiers in stats.pools.items()
    }


def _store_states(stats: CacheStats) -> Nested:
    never = stats.store is StoreState.DETACHED and not stats.stores
    states = {state.value: int(stats.store is state and not never) for state in StoreState}
    return {"none": int(never), **states}


def _moved(stats: ExecutorCounts) -> Nested:
    moved = stats.bytes_moved
    return {
        "device": {"host": moved.l1_to_l2},
        "host": {"device": moved.l2_to_l1, "storage": moved.l2_to_l3},
        "storage": {"host": moved.l3_to_l2},
    }


def _copies(stats: ExecutorCounts) -> Nested:
    ways = [(WAYS[direction], took) for direction, took in stats.copies.items()]
    return {source: {destination: took} for (source, destination), took in ways}


def _calls(stats: ExecutorCounts, of: Callable[[CallMetrics], Nested]) -> Nested:
    return {
        store: {call: of(seen) for call, seen in calls.items()}
        for store, calls in stats.calls.items()
    }


_COUNTER, _GAUGE, _HISTOGRAM = Type.COUNTER, Type.GAUGE, Type.HISTOGRAM
_CALL: Final = ("store", "call")

# fmt: off
GROUP_FAMILIES: Final[tuple[Family[CacheStats], ...]] = (
    Family("info", ("version", "transport", "world_size"), _GAUGE,
           lambda stats: {VERSION: {stats.transport.partition(":")[0]: {stats.world_size: 1}}},
           "Always 1, with the version, the transport of the rounds, and the number of ranks."),
    Family("group_up", ("ended_by",), _GAUGE,
           lambda stats: {stats.ended_by: int(not stats.ended_by)},
           "1 while the group works; 0 once its epoch has ended, with the error's name."),
    Family("rounds", (), _COUNTER, lambda stats: stats.rounds,
           "Rounds, one collective each."),
    Family("step_seconds", (), _HISTOGRAM, lambda stats: stats.steps_took,
           "Time that the engine spent in the cache's step."),
    Family("round_wait_seconds", (), _COUNTER, lambda stats: stats.waited_s,
           "Time that this rank has waited for other ranks in its rounds; the slowest rank has the"
           " lowest value."),
    Family("admissions", (), _COUNTER, lambda stats: stats.replica.admissions,
           "Requests admitted."),
    Family("asked_tokens", (), _COUNTER, lambda stats: stats.replica.asked_tokens,
           "Tokens that admitted requests could have used from the cache."),
    Family("hit_tokens", ("tier",), _COUNTER, lambda stats: stats.replica.hit_tokens,
           "Prompt tokens found in the cache, by tier; peer is another group."),
    Family("missed_tokens", ("cause",), _COUNTER, lambda stats: stats.replica.missed_tokens,
           "Prompt tokens found on no tier, by cause: never_seen, evicted from host memory, lost in"
           " storage, or seen only under an other_key."),
    Family("missed_pages", ("reason",), _COUNTER, lambda stats: stats.replica.missed_pages,
           "Pages that prefetches requested but did not receive, by reason.",
           tuple(each.value for each in MissReason)),
    Family("lacking", ("lacking_rank",), _COUNTER, lambda stats: stats.replica.lacking,
           "Times that this rank's store lacked a page that the other ranks' stores had."),
    Family("namespaces", (), _GAUGE, lambda stats: stats.namespaces,
           "Namespaces (one for each salt) with cached pages or requests."),
    Family("namespaces_begun", (), _COUNTER, lambda stats: stats.namespaces_begun,
           "Times that an empty namespace got its first page or request."),
    Family("pool_pages", ("pool", "tier", "state"), _GAUGE, _pool_pages,
           "Pages of a pool on a tier: free; cached and evictable; cached and held by requests, pins"
           " and operations; or own, private to requests and operations."),
    Family("stored_pages", ("tier", "cause"), _COUNTER, lambda stats: stats.replica.stored_pages,
           "Pages added to a tier, by cause."),
    Family("removed_pages", ("tier", "cause"), _COUNTER, lambda stats: stats.replica.removed_pages,
           "Pages removed from a tier, by cause: room is eviction, limit a namespace's quota."),
    Family("operations", ("kind", "outcome"), _COUNTER, lambda stats: stats.replica.operations,
           "Operations finished, by outcome."),
    Family("operations_in_flight", ("kind",), _GAUGE, lambda stats: stats.in_flight,
           "Operations in flight."),
    Family("unwritten_pages", ("cause",), _GAUGE, lambda stats: stats.unwritten_pages,
           "Pages waiting to be copied to host memory or written to the store, by the cause of the"
           " delay."),
    Family("left_unwritten_pages", ("cause",), _COUNTER, lambda stats: stats.left_unwritten_pages,
           "Pages removed from memory before they could be copied or written."),
    Family("quarantined_operations", (), _COUNTER, lambda stats: stats.replica.quarantined,
           "Operations whose I/O did not stop before the deadline, including those finished since."),
    Family("operations_quarantined", (), _GAUGE, lambda stats: stats.quarantined,
           "Stopped operations whose I/O has not finished: their pages are unusable."),
    Family("store_state", ("state",), _GAUGE,
           _store_states,
           "1 for the state of the group's store, 0 for other states: none if there never was one, lost"
           " if the group detached it after its calls did not return."),
)
"""The metrics counted where the replica runs; in one-scheduler mode, in the scheduler's process."""

EXECUTOR_FAMILIES: Final[tuple[Family[ExecutorCounts], ...]] = (
    Family("moved_bytes", ("source", "destination"), _COUNTER, _moved,
           "Bytes moved between tiers by this rank."),
    Family("copy_seconds", ("source", "destination"), _HISTOGRAM, _copies,
           "Duration of copies, from their start to the step that received their completion."),
    Family("storage_keys", (*_CALL, "outcome"), _COUNTER,
           lambda stats: _calls(stats, lambda seen: seen.outcomes),
           "Keys in calls to stores, by outcome."),
    Family("storage_bytes", _CALL, _COUNTER, lambda stats: _calls(stats, lambda seen: seen.nbytes),
           "Bytes read from stores and written to them."),
    Family("storage_call_seconds", _CALL, _HISTOGRAM,
           lambda stats: _calls(stats, lambda seen: seen.took),
           "Duration of calls to stores."),
    Family("storage_calls_in_flight", _CALL, _GAUGE,
           lambda stats: _calls(stats, lambda seen: seen.in_flight),
           "Calls to stores in flight."),
    Family("storage_calls_interrupted", _CALL, _COUNTER,
           lambda stats: _calls(stats, lambda seen: seen.interrupted),
           "Calls to stores that were cancelled or raised an error."),
    Family("storage_late_calls", (), _COUNTER, lambda stats: stats.storage_late.calls,
           "Calls to stores that timed out."),
    Family("corrupt_pages", (), _COUNTER, lambda stats: stats.pages_corrupt,
           "Pages read from stores with wrong bytes; each counted as a miss."),
)
"""The metrics counted where an executor runs; in one-scheduler mode, in a worker's process."""
# fmt: on

FAMILIES: Final[tuple[Family[CacheStats], ...]] = (*GROUP_FAMILIES, *EXECUTOR_FAMILIES)


def ranked_samples(stats: CacheStats) -> Iterator[tuple[Family[Any], list[tuple[Labels, Number]]]]:
    """Yield each metric with its samples. Their first label is the rank that counted the sample."""
    own: Mapping[int, Any] = {stats.rank: stats}
    workers: Mapping[int, Any] = own if stats.workers is None else stats.workers
    for family in FAMILIES:
        by_rank = workers if family in EXECUTOR_FAMILIES else own
        yield (
            family,
            [
                ((str(rank), *labels), number)
                for rank, counted in by_rank.items()
                for labels, number in family.samples(counted)
            ],
        )
