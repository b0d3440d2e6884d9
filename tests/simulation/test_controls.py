"""An operator's control requests violate no invariant, whenever they arrive."""

import pytest

from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import explore, print_report
from lockstep.simulation.world.world import ENGINE, REPLICA


@pytest.mark.parametrize(
    ("l1", "counters"),
    [
        (REPLICA, {"drops", "limits changed", "weights changed"}),
        (ENGINE, {"drops", "limits changed"}),
    ],
)
def test_what_an_operator_asks_for_breaks_nothing_whoever_owns_the_device(
    l1: str, counters: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = explore(Exploration(seeds=range(5), steps=150, faults="controls", l1=l1), processes=1)
    print_report(report)

    assert report["violations"] == []
    assert counters <= report["coverage"].keys()
    assert f"operator commands: drops {report['coverage']['drops']}" in capsys.readouterr().out
