"""Requests that are retracted and resumed all the time, in pools far too small for all of them."""

import pytest

from lockstep.simulation.explore import ExplorationReport, explore, print_report
from lockstep.simulation.world import REPLICA

RESUMED, TAKEN_UP = "retract resumed", "parked taken up"


def retracting(seeds: range, steps: int) -> ExplorationReport:
    return explore(seeds, steps=steps, faults="retracts", l1=REPLICA, processes=1)


def test_requests_come_back_from_host_memory_and_from_storage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = retracting(range(3), 150)
    assert report["violations"] == []
    there = report["coverage"][RESUMED], report["coverage"][TAKEN_UP]
    assert min(there) > 0
    print_report(report)
    cycles = (
        f"{sum(there)} retract and resume cycles: {there[0]} in host memory, {there[1]} through"
    )
    assert cycles in capsys.readouterr().out


def test_a_request_that_is_taken_up_with_its_tail_is_not_too_long_for_a_window() -> None:
    assert retracting(range(10, 11), 340)["violations"] == []


@pytest.mark.slow
def test_after_ten_thousand_cycles_contents_are_exact_and_pools_where_they_began() -> None:
    report = retracting(range(24), 4_000)
    assert report["violations"] == []
    assert report["coverage"][RESUMED] + report["coverage"][TAKEN_UP] >= 10_000
