"""Requests come when their trace says, spread where it is coarse, and drawn where it says nothing."""

from dataclasses import replace

import pytest

from lockstep.simulation.routing.arrivals import arrivals_of
from lockstep.small_engine.request import WorkloadRequest


def request(arrived_ms: int | None, *hash_ids: int, tokens: int = 512) -> WorkloadRequest:
    return WorkloadRequest(0, tokens, 1, hash_ids or (1,), arrived_ms)


def test_what_has_the_same_time_is_spread_until_the_next_time() -> None:
    arrivals = arrivals_of([request(5000)] * 50 + [request(8000)] * 2, seed=0)

    times = [each.at_s for each in arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] < times[24] < times[49] < 3.0
    assert len(set(times[:50])) == 50
    assert times[50:] == [3.0, 3.0]


def test_the_seed_alone_decides_how_it_is_spread() -> None:
    requests = [request(0), request(0), request(900)]

    assert arrivals_of(requests, 1) == arrivals_of(requests, 1)
    assert arrivals_of(requests, 1) != arrivals_of(requests, 2)


def test_without_times_one_request_comes_in_a_second_on_the_mean() -> None:
    arrivals = arrivals_of([request(0), *[request(None)] * 999], seed=0)

    assert arrivals[-1].at_s == pytest.approx(1000, rel=0.1)


def test_prompts_have_equal_keys_as_far_as_their_blocks_are_equal() -> None:
    one, other = (
        each.prompt
        for each in arrivals_of(
            [request(0, 1, 2, 3, tokens=1400), request(1, 1, 2, 4, tokens=1536)], seed=0
        )
    )

    assert one.keys == other.keys[:2]
    assert (len(one.keys), len(other.keys)) == (2, 3)
    assert (one.pages, other.pages) == (3, 3)
    assert (one.usable_pages, replace(other, tokens=1536).usable_pages) == (2, 2)


def test_a_block_after_another_prefix_is_another_page() -> None:
    one, other = arrivals_of([request(0, 1, 3, tokens=1024), request(1, 2, 3, tokens=1024)], seed=0)

    assert one.prompt.keys[1] != other.prompt.keys[1]
