"""Two simulated groups, one of which hands requests over to the other: all of them are served.

A failing seed prints the command that replays it.
"""

from itertools import product

import pytest

from lockstep.ranks.disaggregation.arrivals import Outcome
from lockstep.simulation.handoff.explore import (
    HandoffReport,
    explore_handoffs,
    print_handoff_report,
)
from lockstep.simulation.handoff.faults import CALM, MIXED, HandoffFault
from lockstep.simulation.handoff.schedule import HandoffSchedule, run_handoff_schedule
from lockstep.simulation.handoff.world import TP_SIZES, draw_handoff_world
from lockstep.simulation.models import MODEL_PROFILES
from lockstep.simulation.revived.revived import HANDOFF_BUGS, find_bug

PAIRS = list(product(TP_SIZES, TP_SIZES))
MORE = "more seeds"
FINDINGS = {
    "window-head": ("the tree offers host window",),
    "unsealed": ("under a page key",),
    "heard-alone": ("gave different answers", "a turn", "digests differ"),
}
"""By bug: what the checkers may say of it, in one of these words."""
FOUND_FROM = {"window-head": 60, "unsealed": 4, "heard-alone": 1}


def explored(
    seeds: range, faults: str, ranks: tuple[int | None, int | None] = (None, None)
) -> HandoffReport:
    return explore_handoffs(
        seeds, faults=faults, prefill_ranks=ranks[0], decode_ranks=ranks[1], processes=1
    )


def found(report: HandoffReport) -> list[str]:
    return [f"{each['what']}\n  replay: {each['replay']}" for each in report["violations"]]


@pytest.mark.parametrize(
    ("faults", "seeds"),
    [
        *(
            pytest.param(each, range(at, at + 1), id=each)
            for at, each in enumerate([CALM, MIXED, *HandoffFault])
        ),
        *(
            pytest.param(each, range(100, 160), id=f"{each}, {MORE}", marks=pytest.mark.slow)
            for each in [CALM, MIXED, *HandoffFault]
        ),
    ],
)
def test_every_request_is_served_whatever_goes_wrong(faults: str, seeds: range) -> None:
    assert found(explored(seeds, faults)) == []


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        *(pytest.param(each, range(at, at + 1), id=f"{each}") for at, each in enumerate(PAIRS)),
        *(
            pytest.param(each, range(200, 230), id=f"{each}, {MORE}", marks=pytest.mark.slow)
            for each in PAIRS
        ),
    ],
)
def test_a_rank_of_which_all_pages_are_damaged_costs_the_hit_at_any_pair_of_sizes(
    ranks: tuple[int, int], seeds: range
) -> None:
    report = explored(seeds, HandoffFault.FLIPPED, ranks)
    assert found(report) == []
    assert report["served"] == report["requests"]


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(300), id=MORE, marks=pytest.mark.slow)]
)
def test_without_faults_nine_of_ten_requests_come_with_everything_at_once(seeds: range) -> None:
    report = explored(seeds, CALM)
    assert found(report) == []
    assert report["handoffs"][Outcome.OK] >= 0.9 * report["requests"]
    assert report["departures"] == {"received": report["requests"]}
    assert set(report["ways"]) == {"directly", "by the store"}
    assert set(report["profiles"]) == set(MODEL_PROFILES)


def test_a_group_that_dies_leaves_nothing_that_the_other_one_holds() -> None:
    schedule = HandoffSchedule(draw_handoff_world(3, faults=HandoffFault.DECODE_DIES))
    result = schedule.run()
    assert result.violation is None
    assert result.departures["expired"] > 0


def test_equal_seeds_give_equal_runs() -> None:
    one, other = (run_handoff_schedule(5, faults=MIXED, record=True) for _ in range(2))
    assert one == other
    assert len(one.transcript) > 10


@pytest.mark.parametrize("name", HANDOFF_BUGS)
def test_a_revived_bug_is_found(name: str) -> None:
    bug = find_bug(name, HANDOFF_BUGS)
    report = explore_handoffs(
        range(FOUND_FROM[name], 2_000),
        profile=bug.profile,
        faults=bug.faults,
        bug=bug,
        processes=1,
    )
    (violation,) = report["violations"]
    assert any(words in violation["what"] for words in FINDINGS[name])


def test_the_report_names_what_was_explored_and_how_requests_came(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_handoff_report(explored(range(2), CALM, (2, 4)))
    printed = capsys.readouterr().out
    assert "2 schedules of two groups" in printed
    assert "TP sizes: 2x4 2\n" in printed
    assert "handoffs: ok " in printed
    assert printed.endswith("no violation\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill_ranks": 3}, "a group of 3 ranks"),
        ({"profile": "elsewhere"}, "unknown profile"),
        ({"faults": "elsewhere"}, "unknown faults"),
    ],
)
def test_what_cannot_be_explored_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw_handoff_world(0, **given)  # type: ignore[arg-type]
