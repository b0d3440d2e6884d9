"""Samples of a run: lists of equal, bounded length that cover the whole run, even when thinned."""

from collections.abc import Iterator
from itertools import count, pairwise

import pytest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.replay import samples as samples_module
from lockstep.launch.replay.samples import (
    Sampler,
    Samples,
    counted_by_size,
    percentile_us,
    upper_us,
)
from lockstep.launch.replay.worker import limits_of
from lockstep.small_engine.scheduler import Scheduler
from lockstep.small_engine.workload import synthetic_requests
from tests.kit.launch.replays_in_process import opened


def sampled(requests: int, pause_s: float) -> tuple[Samples, Scheduler, int]:
    """Return a run's samples and steps; each reading of the clock advances the clock by `pause_s`."""
    settings = ReplaySettings(ranks=1, page_tokens=16, device_pages=600, host_pages=1200)
    cache = opened(settings)
    ticks: Iterator[int] = count()
    sampler = Sampler(cache, lambda: False, clock=lambda: next(ticks) * pause_s)
    workload = iter(synthetic_requests(1, requests))
    scheduler = Scheduler(cache, workload, limits_of(settings), stopped=sampler.look)
    sampler.begin(scheduler)
    scheduler.run()
    samples, steps = sampler.samples(), cache.stats().steps
    cache.close()
    return samples, scheduler, steps


def test_every_count_ends_where_the_run_has_ended() -> None:
    samples, scheduler, steps = sampled(12, 0.02)

    counts = scheduler.counts
    assert {len(values) for values in samples.values()} == {len(samples["seconds"])}  # type: ignore[arg-type]
    assert samples["requests"][-1] == counts.requests + counts.refused
    assert samples["prompt_tokens"][-1] == counts.prompt_tokens
    assert samples["hit_device_tokens"][-1] == counts.hit_device_tokens
    assert samples["requests_in_system"][-1] == 0
    assert samples["rounds"][-1] == steps
    assert samples["seconds"] == sorted(samples["seconds"])


def test_a_long_run_has_no_more_moments_than_fit_and_begins_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples_module, "MOMENTS_MAX", 20)
    samples, scheduler, steps = sampled(40, 1.0)

    pauses = [b - a for a, b in pairwise(samples["seconds"])]
    assert steps > 100
    assert len(samples["seconds"]) <= 20
    assert samples["seconds"][0] == 0
    assert samples["prompt_tokens"][0] == 0
    assert samples["prompt_tokens"][-1] == scheduler.counts.prompt_tokens
    assert min(samples["round_us_p50"][1:-1]) > 0
    assert min(pauses) > 0


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_percentile_of_counted_times_is_within_a_twelfth(share: float) -> None:
    times = [1.5 * 1.01**each for each in range(1000)]

    found = percentile_us(counted_by_size(times), share)

    assert found == pytest.approx(times[int(share * 1000)], rel=1 / 12)


def test_times_beyond_all_sizes_are_counted_with_the_first_and_the_last() -> None:
    counted = counted_by_size([0.0, 1e12])

    assert (counted[0], counted[-1], counted.sum()) == (1, 1, 2)
    assert upper_us(0) > 1.0
    assert percentile_us(counted_by_size([]), 0.5) == 0.0
