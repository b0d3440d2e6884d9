"""A group of two ranks that serves the built-in workload and exposes its metrics."""

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.replay.worker import limits_of
from lockstep.launch.top.group_sample import GroupSample, numbers_in
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.member.group_rank import GroupRank
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.replica.attaching import StoreState
from lockstep.small_engine.counts import ReplayCounts
from lockstep.small_engine.forward_pass import ForwardPass
from lockstep.small_engine.scheduler import Scheduler
from lockstep.small_engine.workload import spread_over, synthetic_requests
from lockstep.telemetry.port import CacheCollector
from tests.kit.ranks.served_group import ServedGroup

RANKS = 2
REQUESTS = 24
SETTINGS = ReplaySettings(
    ranks=RANKS, device_pages=256, host_pages=2048, page_tokens=64, stop_policy="wait_complete"
)
"""Settings of a group. The host pool holds the whole workload, and the device pool holds only the
running requests."""


class WatchedGroup:
    """Serves workloads on a group, and returns the metrics that its ranks expose."""

    def __init__(self, group: ServedGroup, settings: ReplaySettings) -> None:
        self.group = group
        self._limits = limits_of(settings)
        self._namespaces = settings.namespaces
        self._served = 0

    def serve(
        self, *, seed: int = 1, requests: int = REQUESTS, is_written: bool = True
    ) -> ReplayCounts:
        """Serve `requests` requests, flush the writes, and return rank 0's counters.

        If the store has failed, pass `is_written=False` to skip the flush.
        """
        first, self._served = self._served, self._served + requests

        def program(cache: Cache, _: ForwardPass) -> ReplayCounts:
            workload = synthetic_requests(seed, requests)
            numbered = (replace(each, index=first + each.index) for each in workload)
            scheduler = Scheduler(cache, spread_over(self._namespaces, numbered), self._limits)
            assert scheduler.run()
            assert not is_written or cache.flush()
            return scheduler.counts

        counts, *_ = [each.result(120) for each in self.group.begin(program)]
        return counts

    def detach(self) -> None:
        """Detach the store, and step until every rank reports `DETACHED`."""
        for cache in self.group.caches:
            cache.detach_store()
        self.group.until(lambda cache: cache.store_state() is StoreState.DETACHED)

    def seen(self, at_s: float = 0.0) -> GroupSample:
        return seen_of(self.group.caches, at_s)


def seen_of(caches: Sequence[RankCache], at_s: float = 0.0) -> GroupSample:
    """Return the current metrics of these ranks, as a Prometheus scrape would read them."""
    return GroupSample(at_s, {cache.rank: numbers_in(exposed_by(cache)) for cache in caches})


def exposed_by(cache: GroupRank) -> str:
    """Return the current metrics of a cache as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(CacheCollector(cache.stats))
    return generate_latest(registry).decode()


@contextmanager
def watched_group(settings: ReplaySettings) -> Generator[WatchedGroup]:
    with closing(ServedGroup(settings.cache_config(), settings.ranks)) as group:
        yield WatchedGroup(group, settings)
