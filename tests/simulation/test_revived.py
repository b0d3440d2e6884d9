"""Known bugs are revived (put back on purpose), and the simulator finds every one."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from lockstep.launch import simulate
from lockstep.simulation import explore as exploring
from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import ReportedViolation, explore
from lockstep.simulation.revived.revived import REVIVED_BUGS, find_bug
from tests.kit.launch.in_process import Run, refusal

SEEDS_MAX = 200
"""End of the range of seeds with which a test tries to find a bug."""

FINDINGS = {
    "A": ("belongs to", "the tree offers"),
    "B": ("AssertionError at loading_back.py",),
    "C": ("still write", "the tree offers host window", "which holds"),
    "D": ("is held", "which is gone", "still read it", "at tree.py"),
    "E": ("device state page", "device window page"),
    "views": ("device state page", "device kv page", "device page", "which holds garbage"),
    "local-free": ("at serving.py", "digests differ", "answers", "belongs to", "device kv page"),
    "count-not-name": ("digests differ", "the states differ"),
    "early-return": ("did not join round", "reached 0 collectives"),
    "min-of-lengths": ("the tree offers host state", "copies host state"),
    "write-once": ("never accepted by the store",),
    "trust-for-good": ("not written again to a store that lost them",),
    "backup-once": ("never accepted by the store",),
    "one-pin": ("has not pinned the window pages",),
    "window-head": ("the tree offers host window", "under the key of content"),
    "unfilled": ("copies device window page", "the tree offers host window page"),
}
"""For each revived bug: parts of violation texts, at least one of which the checkers report."""
FIRST = {"min-of-lengths": 83, "backup-once": 54}
"""For some revived bugs: the first seed that finds the bug, if small seeds do not find it."""


@cache
def finding(name: str) -> ReportedViolation:
    bug = REVIVED_BUGS[name]
    report = explore(
        Exploration(
            seeds=range(FIRST.get(name, 0), SEEDS_MAX),
            profile=bug.profile,
            faults=bug.faults,
            l1=bug.l1,
            revive=name,
        ),
        processes=1,
    )
    assert report["violations"], f"not found in {SEEDS_MAX} schedules"
    return report["violations"][0]


@pytest.fixture(scope="module", params=FINDINGS)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a revived bug. Tests are grouped by bug, so that each test process explores few bugs."""
    return str(request.param)


def test_a_revived_bug_is_found_by_the_checkers(name: str) -> None:
    what = finding(name)["what"]

    assert any(words in what for words in FINDINGS[name]), what
    assert "revived" not in what, "the bug itself has raised"


def test_the_schedule_that_finds_a_bug_has_no_violation_without_it(name: str) -> None:
    arguments = shlex.split(finding(name)["replay"])
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    seed = finding(name)["seed"]

    report = explore(
        Exploration(
            seeds=range(seed, seed + 1),
            profile=options["--profile"],
            faults=options["--faults"],
            depth=int(options["--depth"]),
            l1=options["--l1"],
        ),
        processes=1,
    )

    assert not report["violations"]


@pytest.mark.parametrize("bug", ["A", "E", "one-pin"])
def test_the_command_that_is_printed_finds_the_bug_again(
    lockstep: Run, tmp_path: Path, bug: str
) -> None:
    found, path = finding(bug), tmp_path / "report.json"

    status, printed, _ = lockstep(*shlex.split(found["replay"])[1:], "--report", path)

    assert status == 1
    assert f"revived bug {bug}: {REVIVED_BUGS[bug].about}" in printed
    assert found["what"] in printed
    assert f"replay: {found['replay']}" in printed
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["revived"], report["violations"]) == (bug, [found])


def test_a_revived_bug_brings_its_model_and_2000_seeds_unless_told_otherwise() -> None:
    usual = Exploration(revive="d").with_what_its_bug_needs()
    explicit = Exploration(seeds=range(5, 6), profile="gemma", faults="calm", l1="both", revive="D")

    assert (usual.seeds, usual.profile, usual.faults) == (range(2000), "hybrid-all", "pressure")
    assert (usual.l1, usual.revive) == ("replica", "D")
    assert explicit.with_what_its_bug_needs() == explicit


def test_a_bug_that_is_not_found_is_another_status(lockstep: Run) -> None:
    arguments = ("--revive", "B", "--profile", "llama", "--seeds", "0:2")

    status, printed, _ = lockstep("simulate", *arguments)

    assert status == simulate.EXIT_NOT_FOUND == 4
    assert printed.endswith("not found in 2 schedules, 200 steps\n")


def test_a_bug_that_nobody_knows_is_bad_input(lockstep: Run) -> None:
    error = refusal(lockstep, "simulate", "--revive", "Z")

    assert "--revive: unknown bug 'Z'; known: A, B, C, D, E, " in error


def test_the_bugs_can_be_listed(lockstep: Run) -> None:
    status, printed, _ = lockstep("simulate", "--revive", "list")

    assert status == 0
    assert [line.split()[0] for line in printed.splitlines()] == [*REVIVED_BUGS] == [*FINDINGS]


def test_a_simulation_that_breaks_down_does_not_pass_for_one_that_has_found_something(
    lockstep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("no process can be started")

    monkeypatch.setattr(exploring, "explore", break_down)

    status, _, error = lockstep("simulate", "--revive", "A")

    assert status == simulate.EXIT_BROKE_DOWN == 70
    assert "lockstep: the simulator failed: RuntimeError: no process can be started" in error


def test_a_violation_that_nobody_has_revived_exits_with_1_as_well(
    lockstep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = shlex.split(finding("early-return")["replay"])[1:-2]
    monkeypatch.setattr(exploring, "SOUND_BUILD", find_bug("early-return").build())

    status, printed, _ = lockstep(*replay)

    assert status == 1
    assert finding("early-return")["what"] in printed


def test_two_processes_find_a_revived_bug_in_the_schedule_in_which_one_does() -> None:
    bug = REVIVED_BUGS["C"]
    # The first seeds of the range run without worker processes. Start at 14, so that only a later
    # seed, which a worker process runs, shows the bug.
    seeds = range(14, 60)
    alone, together = (
        explore(
            Exploration(seeds=seeds, profile=bug.profile, faults=bug.faults, l1=bug.l1, revive="C"),
            processes=count,
        )
        for count in (1, 2)
    )

    assert alone["violations"]
    assert {**alone, "schedules_per_s": 0} == {**together, "schedules_per_s": 0}
