"""What schedules draw: no command, fault or outcome is met much less often than it was.

`recorded_draws.json` has the counts of seeds 0 to 999 of each model.
"""

import json
from pathlib import Path

import pytest

from lockstep.simulation.explore import explore
from lockstep.simulation.world.models import MODEL_PROFILES

RECORDED = json.loads(Path(__file__).with_name("recorded_draws.json").read_text(encoding="utf-8"))
GONE = (
    "aborted when parked",
    "offered or served",
    "parked ",
    "parking ",
    "resumes while others read what is saved",
    "taken up beside pages on the device",
)
"""How what was counted began that went with offers by a store."""


@pytest.mark.slow
@pytest.mark.parametrize("profile", sorted(MODEL_PROFILES))
def test_nothing_is_drawn_less_than_half_as_often_as_recorded(profile: str) -> None:
    report = explore(range(1000), profile=profile, processes=2)
    drawn = {name: report[name] for name in ("operations", "outcomes", "faults", "coverage")}

    rarer = {
        f"{kind}: {name}": (drawn[kind].get(name, 0), count)
        for kind, counts in RECORDED[profile].items()
        for name, count in counts.items()
        if drawn[kind].get(name, 0) < count // 2 and not name.startswith(GONE)
    }

    assert not report["violations"]
    assert rarer == {}
