"""Groups whose device pool is too small for their requests, so that requests are retracted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.config import CacheConfig
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from lockstep.small_engine.counts import ReplayCounts
from lockstep.small_engine.forward_pass import ForwardPass
from lockstep.small_engine.limits import EngineLimits
from lockstep.small_engine.profiles import find_profile
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.scheduler import Scheduler

DEVICE_PAGES = 40
PAGE_TOKENS = {"llama": 2, "hybrid-all": 4}
"""Page size in tokens by profile. Pages are small, so that few tokens cause many evictions."""
REQUESTS_AT_A_TIME = 12
"""Number of concurrent requests. Each one grows to more than half of the device pool."""

Turn = Callable[[Cache, Scheduler], bool]
"""Function that every rank calls before each step. The run stops if the function returns True."""


def config_of(profile: str, *, host_pages: int, store: str | None) -> CacheConfig:
    """Return the settings of a group whose device pool is too small."""
    found, page_tokens = find_profile(profile), PAGE_TOKENS[profile]
    sizes = found.sizes(page_tokens, DEVICE_PAGES, host_pages)
    given = {
        # Give the window pool more device pages than the KV pool, so that only device KV pages are
        # scarce.
        "window_device_pages": DEVICE_PAGES + 512 // page_tokens,
        "window_host_pages": host_pages,
        "state_device_pages": 2 * REQUESTS_AT_A_TIME,
        "state_host_pages": host_pages // 2,
    }
    return CacheConfig(
        model=found.name,
        layout=found.layout(page_tokens),
        components=found.components(
            page_tokens, DEVICE_PAGES, host_pages, {name: given[name] for name in sizes}
        ),
        device_pages=DEVICE_PAGES,
        host_pages=host_pages,
        store=store,
    )


@dataclass(frozen=True)
class Pressed:
    """Counters of one rank after a run, including unfreed pages and operations in flight."""

    ended: bool
    """Whether every request was served. False if the run was stopped early."""
    counts: ReplayCounts
    requests: int
    missing: list[list[int]]
    """Number of leaked pages by tier and pool: free or evictable before the run, but not after it."""
    kept: list[list[int]]
    """Number of the tree's pages that may not be evicted, by tier and component."""
    in_flight: int


def presses(
    cycles: int, turn: Turn = lambda _, __: False
) -> Callable[[Cache, ForwardPass], Pressed]:
    """Return a program that serves requests on a rank until there were `cycles` retractions."""

    def program(cache: Cache, _: ForwardPass) -> Pressed:
        page_tokens, came = cache.config.layout.page_tokens, 0
        free = pages_free(cache)

        def requests() -> Iterator[WorkloadRequest]:
            nonlocal came
            while scheduler.counts.retractions < cycles:
                yield WorkloadRequest(
                    index=came,
                    prompt_length=3 * page_tokens + came % 7,
                    output_length=20 * page_tokens + came % 5,
                    hash_ids=(came,),
                )
                came += 1

        limits = EngineLimits(
            concurrency=REQUESTS_AT_A_TIME,
            page_tokens=page_tokens,
            device_pages=DEVICE_PAGES,
            prefill_tokens=512,
            output_tokens_max=0,
            idle_s=0.002,
            idle_steps_max=20_000,
        )
        scheduler = Scheduler(cache, requests(), limits, stopped=lambda: turn(cache, scheduler))
        ended = scheduler.run()
        if ended:
            # Do not require a complete flush, because the writes of a store with injected failures may
            # time out.
            assert cache.flush() or "fault.error" in str(cache.config.store)
        cache.inspection.check()
        left = zip(free, pages_free(cache), strict=True)
        return Pressed(
            ended=ended,
            counts=scheduler.counts,
            requests=came,
            missing=[[a - b for a, b in zip(*pools, strict=True)] for pools in left],
            kept=[list(each) for each in cache.inspection.prefixes.allocator.ref_counts.kept_pages],
            in_flight=len(cache.inspection.in_flight) + len(cache.inspection.requests),
        )

    return program


def pages_free(cache: Cache) -> list[list[int]]:
    """Return how many pages are free or evictable, by tier and pool."""
    prefixes = cache.inspection.prefixes
    return [
        [prefixes.allocator.available(tier, each.index) for each in prefixes.components]
        for tier in (DEVICE, HOST)
    ]
