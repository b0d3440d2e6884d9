"""A cache opens on every rank or on none, and every rank says why."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep import Cache, CacheConfig, Column, ConfigError, PageLayout, Timeouts
from lockstep.coordinator.collectives.in_process import InProcessGroup

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=4, elements=1),))
CONFIG = CacheConfig(
    model="m", layout=LAYOUT, device_pages=8, host_pages=8, timeouts=Timeouts(open_s=20.0)
)


def open_on(configs: list[CacheConfig], devices: list[str] | None = None) -> list[Future[Cache]]:
    """Open a cache on as many ranks as there are configurations, each in a thread."""
    group = InProcessGroup(len(configs))
    devices = devices or ["cpu"] * len(configs)
    with ThreadPoolExecutor(len(configs)) as threads:
        return [
            threads.submit(Cache.open, config, group.member(rank), device=device)
            for rank, (config, device) in enumerate(zip(configs, devices, strict=True))
        ]


def problems(futures: list[Future[Cache]]) -> set[str]:
    said: set[str] = set()
    for future in futures:
        with pytest.raises(ConfigError) as raised:
            future.result()
        said.add(str(raised.value))
    return said


def test_settings_that_differ_are_named_with_their_ranks() -> None:
    (said,) = problems(open_on([CONFIG, replace(CONFIG, model="other"), CONFIG]))

    assert "model is 'm' on ranks 0, 2, 'other' on rank 1" in said


def test_of_the_pool_sizes_the_smallest_is_used() -> None:
    """Rule R3: capacities are the MIN over ranks at bootstrap."""
    futures = open_on([CONFIG, replace(CONFIG, device_pages=5, host_pages=3)])

    caches = [future.result() for future in futures]
    assert [cache.replica.state.pools[0].capacity for cache in caches] == [5, 5]
    assert [cache.replica.state.pools[1].capacity for cache in caches] == [3, 3]
    for cache in caches:
        cache.close(flush=False)


def test_a_store_that_one_rank_cannot_use_stops_all(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")

    (said,) = problems(open_on([replace(CONFIG, store=f"file://{in_the_way}")] * 2))

    assert str(in_the_way) in said


def test_a_rank_that_fails_in_an_unforeseen_way_is_still_heard_by_the_others() -> None:
    """An out-of-memory error of the device is none of ours, and the others must not wait."""
    (said,) = problems(open_on([CONFIG, CONFIG], ["cpu", "mps:0"]))

    assert said.startswith("rank 1: ")


def test_memory_that_the_machine_does_not_have_is_refused_before_it_is_taken() -> None:
    (said,) = problems(open_on([replace(CONFIG, host_pages=(1 << 31) - 1)] * 2))

    assert "GiB is available" in said


def test_heads_that_the_ranks_cannot_divide_are_refused() -> None:
    (said,) = problems(open_on([CONFIG] * 3))

    assert "4 KV heads, which 3 ranks cannot divide evenly" in said
