"""The comparison of policies says what it found, and judges the router by it."""

import pytest

from lockstep.errors import ConfigError
from lockstep.simulation.routing.arrivals import Arrival, arrivals_of
from lockstep.simulation.routing.comparison import (
    JUDGED_LOAD,
    ComparisonReport,
    ComparisonSettings,
    compare,
    hit_ratio_alone,
    pages_for_half,
)
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return arrivals_of(synthetic_requests(0, 400), 0)


@pytest.fixture(scope="module")
def report(arrivals: list[Arrival]) -> ComparisonReport:
    return compare(arrivals, ComparisonSettings(device_pages=30))


def test_the_memory_for_half_is_the_least_that_suffices() -> None:
    requests = (
        WorkloadRequest(number, 1100, 1, (number % 35, number % 35, 0), number)
        for number in range(200)
    )
    arrivals = arrivals_of(requests, 0)
    ideal = hit_ratio_alone(arrivals, 1 << 20)

    pages = pages_for_half(arrivals)

    assert pages > 3
    assert hit_ratio_alone(arrivals, pages) >= ideal / 2
    assert hit_ratio_alone(arrivals, pages - 1) < ideal / 2


def test_every_policy_is_run_at_every_load(report: ComparisonReport) -> None:
    names = ["round robin", "load", "hits", "own time", "lockstep"]

    assert [each["policy"] for each in report["results"]] == names * 3
    assert [each["load"] for each in report["results"]][::5] == [0.5, JUDGED_LOAD, 1.1]


def test_a_load_is_a_part_of_what_round_robin_can_serve(report: ComparisonReport) -> None:
    busy = [each["busy"] for each in report["results"] if each["policy"] == "round robin"]

    assert busy[0] == pytest.approx(0.5, abs=0.05)
    assert busy[1] == pytest.approx(0.9, abs=0.08)


def test_hit_ratios_lie_between_those_of_one_group(report: ComparisonReport) -> None:
    hits = [each["hit_ratio"] for each in report["results"]]

    assert report["alone_hit_ratio"] < report["together_hit_ratio"] <= report["ideal_hit_ratio"]
    assert max(hits) <= report["together_hit_ratio"]


def test_the_router_is_judged_at_its_load_by_what_was_found(report: ComparisonReport) -> None:
    hits, queueing = report["claims"]
    (ours,) = (
        each
        for each in report["results"]
        if each["policy"] == "lockstep" and each["load"] == JUDGED_LOAD
    )

    assert hits["found"] == ours["hit_ratio"]
    assert hits["wanted"] == pytest.approx(0.9 * report["together_hit_ratio"])
    assert hits["holds"] == (hits["found"] >= hits["wanted"])
    assert queueing["found"] == ours["queueing_p99_s"]
    assert queueing["holds"] == (queueing["found"] <= queueing["wanted"])


def test_without_that_load_nothing_is_judged(arrivals: list[Arrival]) -> None:
    settings = ComparisonSettings(device_pages=30, loads=(0.5,))

    assert compare(arrivals[:50], settings)["claims"] == []


def test_one_request_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="two requests"):
        compare(arrivals_of([WorkloadRequest(0, 9, 1, (1,))], 0), ComparisonSettings())
