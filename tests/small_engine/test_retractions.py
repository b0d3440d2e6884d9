"""Requests are retracted and resumed, because pages are far too few; all end with the right bytes."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.group.cache import Cache
from lockstep.small_engine.retractions import RetractStage
from lockstep.small_engine.scheduler import Scheduler
from tests.kit.left_behind import nothing_left_behind
from tests.kit.ranks.pressed_group import Pressed, Turn, config_of, presses
from tests.kit.ranks.served_group import ServedGroup

LARGE, SMALL = 1000, 30
"""Numbers of host pages: enough for all requests, and enough for one long request only."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in launched ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pressed(
    stack: ExitStack,
    profile: str,
    ranks: int,
    host_pages: int,
    *,
    cycles: int,
    turn: Turn = lambda _, __: False,
    store: str = "memory://retractions",
) -> list[Pressed]:
    config = config_of(profile, host_pages=host_pages, store=store)
    group = stack.enter_context(closing(ServedGroup(config, ranks)))
    return [each.result(1700) for each in group.begin(presses(cycles, turn))]


FAULTS = (
    "pages corrupt",
    "not served",
    "not resumed",
    "recomputed",
    "began again",
    "in flight",
    "missing",
    "kept",
)


def faults(report: Pressed) -> dict[str, object]:
    """Return the values of a rank's report that are zero in a run without failures."""
    counts = report.counts
    values = (
        counts.pages_corrupt,
        report.requests - counts.requests,
        counts.retractions - counts.resumes,
        counts.recomputed_tokens,
        counts.preempted + counts.loads_failed + counts.saves_failed,
        report.in_flight,
        sum(map(sum, report.missing)),
        sum(map(sum, report.kept)),
    )
    return dict(zip(FAULTS, values, strict=True))


PROFILES = ["llama", pytest.param("hybrid-all", marks=pytest.mark.slow)]
CYCLES = [20, pytest.param(2_000, marks=pytest.mark.slow, id="2,000")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cycles", CYCLES)
@pytest.mark.parametrize("profile", ["llama", "hybrid-all"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_whoever_is_put_aside_in_host_memory_comes_back_with_all_that_it_had(
    stack: ExitStack, profile: str, ranks: int, cycles: int
) -> None:
    reports = pressed(stack, profile, ranks, LARGE, cycles=cycles)

    assert [faults(each) for each in reports] == [dict.fromkeys(FAULTS, 0)] * ranks
    assert min(each.counts.retractions for each in reports) >= cycles


SOUND = ("pages corrupt", "not served", "in flight", "missing", "kept")
"""Values of a rank's report that must be zero even after injected failures."""


def unsound(reports: list[Pressed], *, aborted: int = 0) -> list[dict[str, object]]:
    found = [{name: faults(each)[name] for name in SOUND} for each in reports]
    return [each for each in found if each != dict.fromkeys(SOUND, 0) | {"not served": aborted}]


def breaks_seals() -> Turn:
    """Flip a byte in the saved partial page of each retracted request, once per request, on rank 0."""
    broken: set[tuple[str, int]] = set()

    def turn(cache: Cache, scheduler: Scheduler) -> bool:
        if cache.rank or scheduler.counts.loads_failed:
            return False
        places = scheduler.retractions.places
        executor = cache.inspection.executor
        assert isinstance(executor, RankExecutor)
        pool = executor.host_pool
        for name in [each for each, place in places.items() if place is RetractStage.SAVED]:
            saved = cache.inspection.requests.known(name).saved
            pages = {(name, page) for page in (() if saved is None else saved[0])}
            for _, page in pages - broken:
                pool.bytes_tensor.view(-1)[page * pool.layout.page_bytes] ^= 1
            broken.update(pages)
        return False

    return turn


def test_a_saved_page_that_has_changed_costs_its_request_what_it_had_on_every_rank(
    stack: ExitStack,
) -> None:
    reports = pressed(stack, "hybrid-all", 2, LARGE, cycles=15, turn=breaks_seals())

    assert unsound(reports) == []
    assert min(each.counts.loads_failed for each in reports) > 0
    assert min(each.counts.recomputed_tokens for each in reports) > 0


def aborts_one(place: RetractStage) -> Turn:
    aborted: dict[int, str] = {}

    def turn(cache: Cache, scheduler: Scheduler) -> bool:
        there = [name for name, at in scheduler.retractions.places.items() if at is place]
        if there and cache.rank not in aborted:
            aborted[cache.rank] = there[0]
            scheduler.abort(there[0])
        return False

    return turn


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("place", RetractStage)
def test_a_request_that_is_aborted_wherever_it_is_aside_leaves_nothing_behind(
    stack: ExitStack, profile: str, place: RetractStage
) -> None:
    reports = pressed(stack, profile, 2, SMALL, cycles=30, turn=aborts_one(place))

    assert unsound(reports, aborted=1) == []


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("place", RetractStage)
def test_a_group_closes_in_peace_with_a_request_aside_wherever_it_is(
    profile: str, place: RetractStage
) -> None:
    def stops(_: Cache, scheduler: Scheduler) -> bool:
        return place in scheduler.retractions.places.values()

    with nothing_left_behind(), ExitStack() as group:
        reports = pressed(group, profile, 2, SMALL, cycles=80, turn=stops)

    assert [each.ended for each in reports] == [False, False]
