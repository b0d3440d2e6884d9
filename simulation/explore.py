"""Exploring: schedules of many seeds, over a few processes, and one report."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypedDict

from .pair import run_pair
from .rank.epoch import SOUND_BUILD
from .rank.peers import PAGES_GONE, PAGES_READ
from .result import ScheduleResult, Violation
from .revived.revived import RevivedBug, find_bug
from .schedule import run_schedule
from .seeds import quiet_log, run_all
from .world.world import BOTH


class ReportedViolation(TypedDict):
    """A violation as the report has it."""

    seed: int
    step: int
    what: str
    """What the checker has found."""
    replay: str


class ExplorationReport(TypedDict):
    """What an exploration has done, ready for JSON."""

    revived: str | None
    """The bug that was put back, or None. With one, the exploration ends at the first violation."""
    schedules: int
    l1: dict[str, int]
    """How many schedules there were for each owner of the device pages."""
    pairs: dict[str, int]
    """How many schedules there were for each pair of TP sizes; none where each is of one group."""
    profiles: dict[str, int]
    """How many schedules there were for each model."""
    steps: int
    rounds: int
    """How many rounds each rank has taken."""
    epochs: int
    collectives_per_step_max: int
    operations: dict[str, int]
    outcomes: dict[str, int]
    faults: dict[str, int]
    coverage: dict[str, int]
    violations: list[ReportedViolation]
    schedules_per_s: float


_CONTROLLED = ("drops", "limits changed", "weights changed")
"""By what a schedule counts: what an operator has asked for."""

_HANDED = ("handed over", "taken over", PAGES_READ, PAGES_GONE)
"""By what a schedule of two groups counts: what went from one to the other."""

_PRINTED: Mapping[str, Literal["l1", "profiles", "operations", "faults"]] = {
    "owner of the device pages": "l1",
    "models": "profiles",
    "operations": "operations",
    "faults": "faults",
}


def explore(
    seeds: range,
    *,
    ranks: int = 2,
    steps: int = 100,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int | None = None,
    l1: str = BOTH,
    revive: str | None = None,
    pd: str | None = None,
    processes: int = 2,
) -> ExplorationReport:
    """Run the schedule of every seed and return the report.

    With `pd`, a schedule is of two groups, of which one hands requests over to the other: `drawn`, or
    their TP sizes as `PAIRS` has them, which then stand in the place of `ranks`.

    With a bug to `revive`, stop at the first seed, in their order, whose schedule has a violation. A
    depth of None takes both pipeline depths in turn, by the seed. The seed also draws the model and the
    owner of the device pages, unless `profile` and `l1` name them. Raises `ValueError` for sizes and
    names that are not possible. A violation does not raise: it is in the report.
    """
    began = time.perf_counter()
    run = partial(
        _run,
        ranks=ranks,
        steps=steps,
        profile=profile,
        faults=faults,
        depth=depth,
        l1=l1,
        revive=revive,
        pd=pd,
    )
    results = list(run_all(run, seeds, processes, until_found=revive is not None))
    elapsed_s = time.perf_counter() - began
    return _report(results, elapsed_s, revive)


def print_report(report: ExplorationReport) -> None:
    """Print what a person wants to know of `report`: the counts, then each violation."""
    if report["revived"] is not None:
        bug = find_bug(report["revived"])
        _print_revived(bug, report["violations"], report["schedules"], report["steps"])
        return
    print(
        f"{report['schedules']} schedules, {report['steps']} steps, {report['rounds']} rounds, "
        f"{report['epochs']} epochs, {report['schedules_per_s']:.1f} schedules/s, "
        f"at most {report['collectives_per_step_max']} collective per step and rank"
    )
    if report["pairs"]:
        handed = [f"{each} {report['coverage'].get(each, 0)}" for each in _HANDED]
        print("TP sizes: " + ", ".join(f"{key} {n}" for key, n in report["pairs"].items()))
        print("requests and pages: " + ", ".join(handed))
    for title, name in _PRINTED.items():
        counts = report[name]
        print(f"{title}: " + (", ".join(f"{key} {n}" for key, n in counts.items()) or "none"))
    if cycles := report["coverage"].get("retract resumed"):
        print(f"{cycles} retract and resume cycles")
    asked = [f"{each} {n}" for each in _CONTROLLED if (n := report["coverage"].get(each))]
    if asked:
        print(f"an operator: {', '.join(asked)}")
    _print_violations(report["violations"])


def _print_violations(violations: Sequence[ReportedViolation]) -> None:
    """Print what was found, each with the command that shows it again."""
    for violation in violations:
        print(f"seed {violation['seed']}, step {violation['step']}: {violation['what']}")
        print(f"  replay: {violation['replay']}")
    if not violations:
        print("no violation")


def _print_revived(
    bug: RevivedBug, violations: Sequence[ReportedViolation], schedules: int, steps: int
) -> None:
    """Print what was found of a bug that was put back."""
    print(f"revived bug {bug.name}: {bug.about}")
    for violation in violations:
        print(
            f"found by seed {violation['seed']}, the {_ordinal(schedules)} schedule, in step"
            f" {violation['step']}: {violation['what']}"
        )
        print(f"replay: {violation['replay']}")
    if not violations:
        print(f"not found in {schedules} schedules, {steps} steps")


def _ordinal(number: int) -> str:
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"


def _run(
    seed: int,
    *,
    ranks: int,
    steps: int,
    profile: str | None,
    faults: str,
    depth: int | None,
    l1: str,
    revive: str | None,
    pd: str | None,
) -> ScheduleResult:
    build = SOUND_BUILD if revive is None else find_bug(revive).build()
    run = partial(run_schedule, ranks=ranks) if pd is None else partial(run_pair, pd=pd)
    with quiet_log():
        return run(
            seed,
            steps=steps,
            profile=profile,
            faults=faults,
            depth=seed % 2 if depth is None else depth,
            l1=l1,
            build=build,
        )


def _report(
    results: Iterable[ScheduleResult], elapsed_s: float, revived: str | None = None
) -> ExplorationReport:
    counters = {
        name: Counter[str]()
        for name in ("l1", "pairs", "profiles", "operations", "outcomes", "faults", "coverage")
    }
    violations: list[Violation] = []
    schedules = steps = rounds = epochs = collectives_max = 0
    for result in results:
        schedules += 1
        steps += result.steps
        rounds += result.rounds
        epochs += result.epochs
        collectives_max = max(collectives_max, result.collectives_per_step_max)
        counters["l1"][result.l1] += 1
        counters["pairs"] += Counter([result.pd] if result.pd else [])
        counters["profiles"][result.profile] += 1
        counters["operations"] += result.operations
        counters["outcomes"] += result.outcomes
        counters["faults"] += result.faults
        counters["coverage"] += result.coverage
        if result.violation is not None:
            violations.append(result.violation)
    return ExplorationReport(
        revived=revived,
        schedules=schedules,
        l1=_in_order(counters["l1"]),
        pairs=_in_order(counters["pairs"]),
        profiles=_in_order(counters["profiles"]),
        steps=steps,
        rounds=rounds,
        epochs=epochs,
        collectives_per_step_max=collectives_max,
        operations=_in_order(counters["operations"]),
        outcomes=_in_order(counters["outcomes"]),
        faults=_in_order(counters["faults"]),
        coverage=_in_order(counters["coverage"]),
        violations=[_reported(each, revived) for each in violations],
        schedules_per_s=schedules / elapsed_s if elapsed_s else 0.0,
    )


def _reported(violation: Violation, revived: str | None) -> ReportedViolation:
    """Return a violation as the report has it, with the bug that was put back, if one was."""
    put_back = "" if revived is None else f" --revive {revived}"
    return ReportedViolation(
        seed=violation.seed,
        step=violation.step,
        what=str(violation.finding),
        replay=violation.replay + put_back,
    )


def _in_order(counts: Counter[str]) -> dict[str, int]:
    """Return counts by name."""
    return dict(sorted(counts.items()))
