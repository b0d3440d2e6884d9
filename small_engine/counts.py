"""Counters of one rank during a replay."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ranks.protocol.answers import Admission


@dataclass(frozen=True, slots=True)
class ComparedPages:
    """Result of comparing a request's pages of one pool with the bytes that they should have."""

    pages: int
    corrupt: int
    """Number of pages that have wrong bytes or that are missing from the request's page table."""


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """Numbers of pages of one pool that were compared with the bytes that they should have."""

    pages_verified: int = 0
    """Number of cached pages compared byte by byte when their request became ready."""
    pages_rechecked: int = 0
    """Number of pages, including shared ones, compared when their request had finished."""
    pages_corrupt: int = 0
    """Number of compared pages with wrong bytes."""


@dataclass(slots=True, kw_only=True)
class ReplayCounts:
    """Counters of a replay. Equal on every rank except the counters of corrupt pages."""

    requests: int = 0
    refused: int = 0
    """Number of requests refused because they exceed the device pool; not included in other counters.
    """
    retractions: int = 0
    """Number of times that a request was retracted so that an older one could continue."""
    resumes: int = 0
    """Number of times that a retracted request was resumed. The remaining retracted requests were
    aborted or recomputed."""
    preempted: int = 0
    """Number of times that a request lost its device pages to an older request, without a copy in host
    memory, and was recomputed."""
    recomputed_tokens: int = 0
    """Number of tokens computed again because their KV was lost; not included in other counters."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Number of prompt tokens computed. `prompt_tokens` is this number plus the tokens that were cached
    on the device, in host memory or in storage."""
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_storage_tokens: int = 0
    output_tokens: int = 0
    loads_failed: int = 0
    saves_failed: int = 0
    """Number of retractions in which a copy failed, so that the request was recomputed."""
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
        """Add a served request, its lengths and its cached tokens to the counters."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.computed_tokens += prompt - hits.cached_tokens
        self.hit_device_tokens += hits.device_tokens
        self.hit_host_tokens += hits.host_tokens
        self.hit_storage_tokens += hits.storage_tokens
        self.output_tokens += outputs

    def add(self, verified: Mapping[str, ComparedPages], *, finished: bool) -> None:
        """Add the pages that were compared for a request at its start or its end."""
        for pool, each in verified.items():
            counts = self.pools.setdefault(pool, PoolCounts())
            counts.pages_corrupt += each.corrupt
            if finished:
                counts.pages_rechecked += each.pages
            else:
                counts.pages_verified += each.pages
