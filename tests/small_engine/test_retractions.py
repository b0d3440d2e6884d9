"""Requests that come and go over a pool that is far too small: each has its own bytes at the end."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from tests.kit.ranks.pressed_group import Pressed, config_of, presses
from tests.kit.ranks.served_group import ServedGroup

LARGE, SMALL = 1000, 40
"""Host pages: for all requests, or for two of them."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch compute in the thread of the rank, as launched ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pressed(
    stack: ExitStack, profile: str, ranks: int, host_pages: int, *, cycles: int
) -> list[Pressed]:
    store = f"memory://retractions-{profile}-{ranks}-{host_pages}-{cycles}"
    config = config_of(profile, host_pages=host_pages, store=store)
    group = stack.enter_context(closing(ServedGroup(config, ranks)))
    return [each.result(1700) for each in group.begin(presses(cycles))]


def faults(told: Pressed) -> dict[str, object]:
    """Return what must be nothing, of what a rank says."""
    counts = told.counts
    return {
        "pages corrupt": counts.pages_corrupt,
        "not served": told.requests - counts.requests,
        "not resumed": counts.retractions - counts.resumes,
        "recomputed": counts.recomputed_tokens,
        "began again": counts.preempted + counts.loads_failed + counts.saves_failed,
        "in flight": told.in_flight,
        "missing": sum(map(sum, told.missing)),
        "kept": sum(map(sum, told.kept)),
    }


CYCLES = [pytest.param(150, id="150"), pytest.param(10_000, marks=pytest.mark.slow, id="10,000")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cycles", CYCLES)
@pytest.mark.parametrize("profile", ["llama", "hybrid-all"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_whoever_is_put_aside_in_host_memory_comes_back_with_all_that_it_had(
    stack: ExitStack, profile: str, ranks: int, cycles: int
) -> None:
    told = pressed(stack, profile, ranks, LARGE, cycles=cycles)

    assert not any(value for each in told for value in faults(each).values())
    assert min(each.counts.retractions for each in told) >= cycles
    assert {each.counts.resumes_from_storage for each in told} == {0}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cycles", CYCLES)
@pytest.mark.parametrize("profile", ["llama", "hybrid-all"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_whoever_host_memory_has_no_room_for_comes_back_out_of_storage(
    stack: ExitStack, profile: str, ranks: int, cycles: int
) -> None:
    told = pressed(stack, profile, ranks, SMALL, cycles=cycles)

    assert not any(value for each in told for value in faults(each).values())
    assert min(each.counts.retractions for each in told) >= cycles
    assert min(each.counts.resumes_from_storage for each in told) > 0
