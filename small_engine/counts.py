"""Counters of a rank during a replay."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ranks.protocol.answers import Admission


@dataclass(frozen=True, slots=True)
class ComparedPages:
    """Result of comparing one pool's pages."""

    pages: int
    corrupt: int
    """Pages with wrong bytes, and pages missing from the request's page table."""


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """Counters of compared pages of one pool."""

    pages_verified: int = 0
    """Cached pages compared byte by byte when a request used them."""
    pages_rechecked: int = 0
    """Pages compared when their request finished, including shared pages."""
    pages_corrupt: int = 0
    """Verified or rechecked pages with wrong bytes."""


@dataclass(slots=True, kw_only=True)
class ReplayCounts:
    """Counters of a replay, in the units of their names. Equal on every rank except corrupt pages."""

    requests: int = 0
    refused: int = 0
    """Requests too large for the device pool; not included in other counters."""
    retractions: int = 0
    """How often a request was retracted so that an older one could continue."""
    resumes: int = 0
    """How often a request was resumed. Other retracted requests were aborted or recomputed."""
    preempted: int = 0
    """How often a request was dropped for an older one and recomputed, because it could not be
    saved."""
    recomputed_tokens: int = 0
    """Tokens computed again after they were lost; not included in other counters."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens computed; with the three hit counters they sum up to `prompt_tokens`."""
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_storage_tokens: int = 0
    output_tokens: int = 0
    loads_failed: int = 0
    saves_failed: int = 0
    """Retractions with a failed copy, so that the request was recomputed."""
    idle_steps: int = 0
    pools: dict[str, PoolCounts] = field(default_factory=dict[str, PoolCounts])
    """Counters of compared pages, by pool name."""

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
        """Count a served request, its lengths and its cached tokens."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.computed_tokens += prompt - hits.cached_tokens
        self.hit_device_tokens += hits.device_tokens
        self.hit_host_tokens += hits.host_tokens
        self.hit_storage_tokens += hits.storage_tokens
        self.output_tokens += outputs

    def add(self, verified: Mapping[str, ComparedPages], *, finished: bool) -> None:
        """Count the pages compared for a request that starts, or that has finished."""
        for pool, each in verified.items():
            counts = self.pools.setdefault(pool, PoolCounts())
            counts.pages_corrupt += each.corrupt
            if finished:
                counts.pages_rechecked += each.pages
            else:
                counts.pages_verified += each.pages
