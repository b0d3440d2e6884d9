"""Telemetry of a cache for vLLM: the statistics, and the tier or store from which hits come."""

from collections.abc import Iterable, Mapping
from typing import Final

from ...storage_backends.uri import parse_uri
from ...telemetry.families import ranked_samples
from .contract import VllmRequest
from .scheduler_side import SchedulerSide
from .stats import RESTORED, Restored, StatsFeed, StatsReport
from .tracked import PassResult

HOST: Final = "host"
PEER: Final = "p2p"
ELSEWHERE: Final = "external_unspecified"
SOURCES: Final[Mapping[str, str]] = {"file": "disk", "3fs": "disk", "peer": PEER}
"""Maps the URI scheme of a store to vLLM's name for the source of its hits."""


def source_of(store: str | None) -> str:
    """Return vLLM's name for the source of hits from this store."""
    return ELSEWHERE if store is None else SOURCES.get(parse_uri(store).scheme, ELSEWHERE)


class PluginTelemetry:
    """Collects one rank's statistics from the scheduler's side of the plug-in."""

    def __init__(self, side: SchedulerSide, store: str | None) -> None:
        self._side = side
        self._source = source_of(store)
        self._feed = StatsFeed()
        self._restored = Restored()

    def load_begun(self, request: VllmRequest, tokens: int) -> None:
        """Record that a request starts to load `tokens` tokens."""
        self._restored.begun(request.request_id, tokens)

    def loads_ended(self, result: PassResult) -> None:
        """Record the loads that finished or failed in a step."""
        self._restored.ended("failed", result.failed)
        self._restored.ended("saved", result.loaded)

    def request_gone(self, request: VllmRequest) -> None:
        """Record that a request has finished."""
        self._restored.ended("dropped", [request.request_id])

    def report(self) -> StatsReport | None:
        """Return the changes of the statistics since the last report; None if no report is due."""
        if not self._feed.due(idle=self._side.idle):
            return None
        # Get the statistics without the durations of single rounds, because no metric uses them.
        stats = self._side.cache.stats(rounds=0)
        restored = RESTORED.samples(self._restored)
        own = [((str(stats.rank), *labels), tokens) for labels, tokens in restored]
        return self._feed.report([*ranked_samples(stats), (RESTORED, own)])

    def hit_sources(self, request: VllmRequest, tokens: int) -> dict[str, int]:
        """Return how many of a request's loaded tokens come from each source, by vLLM's names."""
        tracked = self._side.tracked(request)
        if tracked is None:
            return {}
        start = tracked.device_tokens
        first, last = self._side.cache.fetched(tracked.name)
        fetched = max(0, min(start + tokens, last) - max(start, first))
        handed_over = tracked.taken is not None and tracked.taken.source
        source = PEER if handed_over else self._source
        parts: Iterable[tuple[str, int]] = ((HOST, tokens - fetched), (source, fetched))
        return {source: count for source, count in parts if count}
