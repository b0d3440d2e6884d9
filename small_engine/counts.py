"""What a rank counts while it replays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ranks.protocol.answers import Admission


@dataclass(frozen=True, slots=True)
class ComparedPages:
    """Counts what a comparison of one pool has shown."""

    pages: int
    corrupt: int
    """Pages whose bytes were wrong, or that the request should have and has not."""


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """Counts what was compared in one pool."""

    pages_verified: int = 0
    """Pages that came from the cache and were compared byte by byte when they were used."""
    pages_rechecked: int = 0
    """Pages, own and shared, that were compared when their request had finished."""
    pages_corrupt: int = 0
    """Pages, verified or rechecked, whose bytes were wrong."""


@dataclass(slots=True, kw_only=True)
class ReplayCounts:
    """Counts what happened, in units of their names. The same on every rank, but for corrupt pages."""

    requests: int = 0
    """Requests that were served."""
    refused: int = 0
    """Requests that can never fit the device pool; nothing else counts them."""
    retractions: int = 0
    """How often a request left the device with all that it had, so that an older one could go on."""
    resumes: int = 0
    """How often one came back with all that it had; the others were aborted, or began again."""
    preempted: int = 0
    """How often a request gave up its pages so that an older one could go on, and began again: there
    was no room to save it, or nothing to be saved."""
    recomputed_tokens: int = 0
    """Tokens that requests had, lost, and computed again; nothing else counts them."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were computed; with the three hits they make `prompt_tokens`."""
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_storage_tokens: int = 0
    output_tokens: int = 0
    loads_failed: int = 0
    saves_failed: int = 0
    """Retractions of which a copy failed, so that the request began again."""
    idle_steps: int = 0
    pools: dict[str, PoolCounts] = field(default_factory=dict[str, PoolCounts])
    """What was compared, by the pool's name."""

    @property
    def pages_verified(self) -> int:
        return sum(each.pages_verified for each in self.pools.values())

    @property
    def pages_rechecked(self) -> int:
        return sum(each.pages_rechecked for each in self.pools.values())

    @property
    def pages_corrupt(self) -> int:
        return sum(each.pages_corrupt for each in self.pools.values())

    def add_served(self, prompt: int, outputs: int, hits: Admission) -> None:
        """Count a request of so many tokens that was served, and what was cached for it."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.computed_tokens += prompt - hits.cached_tokens
        self.hit_device_tokens += hits.device_tokens
        self.hit_host_tokens += hits.host_tokens
        self.hit_storage_tokens += hits.storage_tokens
        self.output_tokens += outputs

    def add(self, verified: Mapping[str, ComparedPages], *, finished: bool) -> None:
        """Count what was compared for a request that has finished, or that begins."""
        for pool, each in verified.items():
            counts = self.pools.setdefault(pool, PoolCounts())
            counts.pages_corrupt += each.corrupt
            if finished:
                counts.pages_rechecked += each.pages
            else:
                counts.pages_verified += each.pages
