"""Exploration: runs one simulated schedule per seed in a few processes, and reports the results."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children
from typing import Final, Literal, TypedDict

from .exploration import SEEDS, Exploration
from .pair import run_pair
from .rank.epoch import SOUND_BUILD
from .rank.simulated_peers import PAGES_GONE, PAGES_READ
from .result import ScheduleResult, Violation
from .revived.revived import RevivedBug, find_bug
from .schedule import run_schedule
from .world.world import BOTH


class ReportedViolation(TypedDict):
    """A violation, as reported by an exploration."""

    seed: int
    step: int
    what: str
    """The message of the checker that found the violation."""
    replay: str


class ExplorationReport(TypedDict):
    """Result of an exploration, ready for JSON."""

    revived: str | None
    """Name of the known bug that the exploration reintroduced (revived), or None. With such a bug, the
    exploration stops at the first violation."""
    schedules: int
    l1: dict[str, int]
    """Number of schedules, by owner of the device pages."""
    pairs: dict[str, int]
    """Number of schedules, by pair of TP sizes; empty if each schedule has a single group."""
    profiles: dict[str, int]
    """Number of schedules, by model."""
    steps: int
    rounds: int
    """Number of rounds per rank, summed over all schedules."""
    epochs: int
    collectives_per_step_max: int
    operations: dict[str, int]
    outcomes: dict[str, int]
    faults: dict[str, int]
    coverage: dict[str, int]
    violations: list[ReportedViolation]
    schedules_per_s: float


_CONTROLLED = ("drops", "limits changed", "weights changed")
"""Names of the coverage counters for operator commands."""

_HANDED = ("handed over", "taken over", PAGES_READ, PAGES_GONE)
"""Names of the coverage counters for handoffs in schedules with two groups."""

_PRINTED: Mapping[str, Literal["l1", "profiles", "operations", "faults"]] = {
    "owner of the device pages": "l1",
    "models": "profiles",
    "operations": "operations",
    "faults": "faults",
}


_ALONE: Final = 8
"""Fewer seeds than this run without worker processes; with `revive`, so do this many first seeds."""


def explore(
    exploration: Exploration, *, processes: int = 2, begin: Callable[[], None] | None = None
) -> ExplorationReport:
    """Run the schedule of each seed and return the report.

    Each worker process calls `begin` when it starts. If a known bug is reintroduced (revived), stop at
    the first seed whose schedule has a violation. A violation does not raise; it is part of the report.
    Raises `ValueError` for invalid sizes and names.
    """
    began = time.perf_counter()
    whole = exploration.with_what_its_bug_needs()
    results = _run_all(whole, whole.seeds or SEEDS, processes, begin)
    return _report(list(results), time.perf_counter() - began, whole.revive)


def print_report(report: ExplorationReport) -> None:
    """Print an exploration's report for a person: the counts, then each violation."""
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
    commands = [f"{each} {n}" for each in _CONTROLLED if (n := report["coverage"].get(each))]
    if commands:
        print(f"operator commands: {', '.join(commands)}")
    _print_violations(report["violations"])


def _print_violations(violations: Sequence[ReportedViolation]) -> None:
    for violation in violations:
        print(f"seed {violation['seed']}, step {violation['step']}: {violation['what']}")
        print(f"  replay: {violation['replay']}")
    if not violations:
        print("no violation")


def _print_revived(
    bug: RevivedBug, violations: Sequence[ReportedViolation], schedules: int, steps: int
) -> None:
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


@contextmanager
def quiet_log() -> Generator[None]:
    """Suppress Lockstep's log messages, because simulated faults would cause many warnings."""
    log = logging.getLogger("lockstep")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _run_all(
    exploration: Exploration, seeds: range, processes: int, begin: Callable[[], None] | None
) -> Iterator[ScheduleResult]:
    """Yield the schedules' results in seed order.

    If the exploration reintroduces a known bug (`revive`), the first result with a violation is the
    last.
    """
    run, until_found = partial(_run, exploration=exploration), exploration.revive is not None
    # Try the first seeds without worker processes, because most reintroduced bugs violate a rule in
    # them.
    alone = len(seeds) if processes <= 1 or len(seeds) < _ALONE else _ALONE * until_found
    for seed in seeds[:alone]:
        result = run(seed)
        yield result
        if until_found and result.violation is not None:
            return
    rest = seeds[alone:]
    if not rest:
        return
    chunk = 4 if until_found else max(1, min(16, len(rest) // (4 * processes)))
    others = active_children()
    pool = ProcessPoolExecutor(processes, initializer=begin)
    try:
        for result in pool.map(run, rest, chunksize=chunk):
            yield result
            if until_found and result.violation is not None:
                return
    finally:
        # Kill the worker processes instead of waiting, because no further result is needed.
        for each in set(active_children()).difference(others):
            each.kill()
        pool.shutdown(cancel_futures=True)


def _run(seed: int, exploration: Exploration) -> ScheduleResult:
    bug, depth = exploration.revive, exploration.depth
    if exploration.pd is None:
        run = partial(run_schedule, ranks=exploration.ranks or 2)
    else:
        run = partial(run_pair, pd=exploration.pd)
    with quiet_log():
        return run(
            seed,
            steps=exploration.steps,
            profile=exploration.profile,
            faults=exploration.faults or "mixed",
            depth=seed % 2 if depth is None else depth,
            l1=exploration.l1 or BOTH,
            build=SOUND_BUILD if bug is None else find_bug(bug).build(),
        )


def _report(
    results: Sequence[ScheduleResult], elapsed_s: float, revived: str | None
) -> ExplorationReport:
    found = [each.violation for each in results if each.violation is not None]
    return ExplorationReport(
        revived=revived,
        schedules=len(results),
        l1=_added(Counter([each.l1]) for each in results),
        pairs=_added(Counter([each.pd]) for each in results if each.pd),
        profiles=_added(Counter([each.profile]) for each in results),
        steps=sum(each.steps for each in results),
        rounds=sum(each.rounds for each in results),
        epochs=sum(each.epochs for each in results),
        collectives_per_step_max=max(each.collectives_per_step_max for each in results),
        operations=_added(each.operations for each in results),
        outcomes=_added(each.outcomes for each in results),
        faults=_added(each.faults for each in results),
        coverage=_added(each.coverage for each in results),
        violations=[_reported(each, revived) for each in found],
        schedules_per_s=len(results) / elapsed_s,
    )


def _reported(violation: Violation, revived: str | None) -> ReportedViolation:
    """Return a violation for the report, with `--revive` in its replay command if a bug was revived."""
    put_back = "" if revived is None else f" --revive {revived}"
    return ReportedViolation(
        seed=violation.seed,
        step=violation.step,
        what=violation.finding,
        replay=violation.replay + put_back,
    )


def _added(counts: Iterable[Counter[str]]) -> dict[str, int]:
    return dict(sorted(sum(counts, Counter[str]()).items()))
