"""The scheduler on a real cache of one rank: correct counts and bytes, and no deadlock."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.small_engine.counts import ReplayCounts
from lockstep.small_engine.profiles import PROFILES
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests
from tests.kit.launch.replays_in_process import opened, replayed, scheduler

PAGE = 64
ROOMY = ReplaySettings(
    ranks=1, requests=40, concurrency=1, device_pages=4000, host_pages=4000, output_tokens_max=4
)


def ideal_hits(requests: Iterator[WorkloadRequest]) -> int:
    """Return how many tokens an unbounded cache hits: whole pages before a prompt's last token."""
    seen: set[bytes] = set()
    hits = 0
    for request in requests:
        tokens = request.prompt_tokens
        prefixes = [tokens[:end].tobytes() for end in range(PAGE, request.prompt_length + 1, PAGE)]
        matchable = prefixes[: (request.prompt_length - 1) // PAGE]
        hits += PAGE * next(
            (n for n, each in enumerate(matchable) if each not in seen), len(matchable)
        )
        seen.update(prefixes)
    return hits


def hit_tokens(counts: ReplayCounts) -> int:
    return counts.hit_device_tokens + counts.hit_host_tokens + counts.hit_storage_tokens


@pytest.mark.parametrize(
    ("profile", "depth"), [("llama", 0), *((profile, 1) for profile in PROFILES)]
)
def test_one_request_at_a_time_with_room_hits_exactly_what_an_ideal_cache_hits(
    profile: str, depth: int
) -> None:
    settings = replace(ROOMY, profile=profile, depth=depth)

    counts = replayed(settings)

    requests = list(synthetic_requests(settings.seed, settings.requests))
    assert counts.prompt_tokens == sum(request.prompt_length for request in requests)
    assert hit_tokens(counts) == ideal_hits(iter(requests))
    assert counts.computed_tokens + hit_tokens(counts) == counts.prompt_tokens
    assert counts.pools["kv"].pages_verified == hit_tokens(counts) // PAGE
    assert counts.pools.keys() == settings.pool_pages().keys()
    assert all(pool.pages_verified and pool.pages_rechecked for pool in counts.pools.values())
    assert counts.pages_corrupt == 0
    assert counts.preempted == 0


@pytest.mark.parametrize(
    ("profile", "depth", "stop_policy", "sizes"),
    [
        *(
            ("llama", depth, policy, {})
            for depth in (0, 1)
            for policy in ("best_effort", "wait_complete", "timeout")
        ),
        ("gemma", 0, "timeout", {"window_device_pages": 40, "window_host_pages": 30}),
        ("qwen-next", 1, "timeout", {"state_device_pages": 4, "state_host_pages": 3}),
        ("gpt-oss", 1, "timeout", {"window_device_pages": 4, "window_host_pages": 2}),
        (
            "hybrid-all",
            0,
            "timeout",
            {
                "window_device_pages": 30,
                "window_host_pages": 20,
                "state_device_pages": 4,
                "state_host_pages": 3,
            },
        ),
    ],
)
@pytest.mark.parametrize("requests", [25, pytest.param(60, marks=pytest.mark.slow)])
def test_small_pools_make_it_slower_and_never_wrong_or_stuck(
    tmp_path: Path,
    *,
    profile: str,
    depth: int,
    stop_policy: str,
    sizes: dict[str, int],
    requests: int,
) -> None:
    settings = ReplaySettings(
        ranks=1,
        profile=profile,
        requests=requests,
        concurrency=6,
        device_pages=140,
        host_pages=150,
        store=tmp_path.as_uri(),
        stop_policy=stop_policy,
        depth=depth,
        output_tokens_max=4,
    ).with_sizes(sizes)

    counts = replayed(settings)

    assert counts.requests + counts.refused == requests
    assert counts.computed_tokens + hit_tokens(counts) == counts.prompt_tokens
    assert counts.pages_corrupt == 0
    assert all(pool.pages_rechecked for pool in counts.pools.values())


def test_write_back_is_never_stuck_on_pages_that_the_request_itself_holds() -> None:
    """Regression: under write-back, a request waited for copies of pages that it held itself."""
    settings = ReplaySettings(
        ranks=1,
        profile="gemma",
        requests=60,
        device_pages=128,
        host_pages=128,
        write_policy="write_back",
    ).with_sizes({"window_device_pages": 128, "window_host_pages": 18})

    counts = replayed(settings)

    assert counts.requests == 60
    assert counts.pages_corrupt == 0


def served_three_that_grow(profile: str, *, host_pages: int) -> ReplayCounts:
    """Serve three requests; each needs 16 pages at the start of decoding and 22 at the end."""
    settings = replace(
        ROOMY,
        profile=profile,
        concurrency=3,
        device_pages=40,
        window_device_pages=100,
        host_pages=host_pages,
        output_tokens_max=0,
    )
    requests = [
        WorkloadRequest(
            index=index, prompt_length=1000, output_length=400, hash_ids=(2 * index, 99)
        )
        for index in range(3)
    ]
    cache = opened(settings)
    run = scheduler(settings, cache, iter(requests))
    run.run()
    cache.close()
    return run.counts


@pytest.mark.parametrize("profile", ["gpt-oss", "hybrid-all"])
def test_when_there_is_no_room_to_decode_the_youngest_request_is_put_aside_and_comes_back(
    profile: str,
) -> None:
    counts = served_three_that_grow(profile, host_pages=4000)

    assert counts.requests == 3
    assert counts.resumes == counts.retractions > 0
    assert (counts.preempted, counts.recomputed_tokens) == (0, 0)
    assert counts.computed_tokens + hit_tokens(counts) == counts.prompt_tokens == 3000
    assert counts.output_tokens == 1200
    assert counts.pages_corrupt == 0


@pytest.mark.parametrize("profile", ["gpt-oss", "hybrid-all"])
def test_a_request_that_nothing_has_room_to_save_begins_again(profile: str) -> None:
    counts = served_three_that_grow(profile, host_pages=8)

    assert counts.requests == 3
    assert counts.resumes == counts.retractions
    assert counts.preempted > 0
    assert counts.recomputed_tokens > 0
    assert counts.computed_tokens + hit_tokens(counts) == counts.prompt_tokens == 3000
    assert counts.output_tokens == 1200
    assert counts.pages_corrupt == 0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("requests", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_a_second_run_on_the_same_store_hits_what_the_first_persisted(
    tmp_path: Path, profile: str, requests: int
) -> None:
    settings = replace(ROOMY, profile=profile, requests=requests, store=tmp_path.as_uri())

    cold, warm = replayed(settings), replayed(settings)

    assert cold.hit_storage_tokens == 0
    assert warm.hit_storage_tokens > cold.computed_tokens // 2
    assert warm.computed_tokens < cold.computed_tokens // 4
    assert warm.pages_corrupt == 0


def test_a_request_that_can_never_fit_is_refused_by_name_and_not_counted() -> None:
    settings = replace(ROOMY, device_pages=40)
    requests = [
        WorkloadRequest(index=0, prompt_length=200, output_length=4, hash_ids=(1,)),
        WorkloadRequest(index=1, prompt_length=5000, output_length=4, hash_ids=tuple(range(10))),
        WorkloadRequest(index=2, prompt_length=200, output_length=4, hash_ids=(1,)),
    ]
    cache = opened(settings)

    run = scheduler(settings, cache, iter(requests))
    run.run()
    cache.close()

    assert (run.counts.requests, run.counts.refused) == (2, 1)
    assert run.counts.prompt_tokens == 400
    assert run.refusals == [
        "request-1 needs 79 device pages for 5004 tokens, and there are 40; raise --device-pages"
    ]


@pytest.mark.parametrize(
    ("profile", "pool", "column", "corrupt"),
    [
        # Nine full-attention pages are hits. Each is checked twice: at the hit, and at the request's
        # end.
        ("llama", "kv", "v", 18),
        # Two window pages are hits. Both are checked at the hit, and one again at the request's end.
        ("gpt-oss", "window", "v", 3),
        # The state is checked at the hit only, because decoding replaces it before the request ends.
        ("qwen-next", "state", "conv", 1),
        ("hybrid-all", "kv", "scale", 18),
        ("glm", "kv", "index_scale", 18),
    ],
)
def test_bytes_that_vanish_from_any_column_of_any_pool_are_counted_as_corrupt_pages_of_it(
    profile: str, pool: str, column: str, corrupt: int
) -> None:
    cache = opened(replace(ROOMY, profile=profile))

    def requests() -> Iterator[WorkloadRequest]:
        yield WorkloadRequest(index=0, prompt_length=640, output_length=1, hash_ids=(1, 2))
        cache.device_pools[pool].column(column).zero_()
        yield WorkloadRequest(index=1, prompt_length=640, output_length=1, hash_ids=(1, 2))

    run = scheduler(replace(ROOMY, profile=profile), cache, requests())
    run.run()
    cache.close()

    assert run.counts.pools[pool].pages_corrupt == run.counts.pages_corrupt == corrupt


def test_a_scheduler_that_is_told_to_stop_does_so_at_the_next_step() -> None:
    cache = opened(ROOMY)
    answers = iter([False, False, True])
    run = scheduler(ROOMY, cache, stopped=lambda: next(answers))

    assert not run.run()

    assert cache.stats().steps == 2
    cache.close()
