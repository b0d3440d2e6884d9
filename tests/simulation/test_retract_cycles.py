"""Requests are constantly retracted and resumed, in pools far too small for all of them."""

import pytest

from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import ExplorationReport, explore, print_report
from lockstep.simulation.world.world import REPLICA

RESUMED = "retract resumed"


def retracting(seeds: range, steps: int) -> ExplorationReport:
    return explore(
        Exploration(seeds=seeds, steps=steps, faults="retracts", l1=REPLICA), processes=1
    )


def test_requests_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    report = retracting(range(3), 150)
    assert report["violations"] == []
    cycles = report["coverage"][RESUMED]
    assert cycles > 0
    print_report(report)
    assert f"{cycles} retract and resume cycles" in capsys.readouterr().out


@pytest.mark.slow
def test_after_a_thousand_cycles_contents_are_exact_and_pools_where_they_began() -> None:
    report = retracting(range(3), 4_000)
    assert report["violations"] == []
    assert report["coverage"][RESUMED] >= 1_000
