"""Exploring: many seeds, over a few processes, and one report."""

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypedDict

from .schedule import ScheduleResult, Violation, run_schedule
from .world import BOTH


class ReportedViolation(TypedDict):
    """A violation as the report has it."""

    seed: int
    step: int
    what: str
    replay: str


class Report(TypedDict):
    """What an exploration did, ready for JSON."""

    schedules: int
    l1: dict[str, int]
    """Schedules by who owned the device pages."""
    steps: int
    rounds: int
    """On each rank."""
    epochs: int
    collectives_per_step_max: int
    operations: dict[str, int]
    outcomes: dict[str, int]
    faults: dict[str, int]
    coverage: dict[str, int]
    violations: list[ReportedViolation]
    schedules_per_s: float


_PRINTED: Mapping[str, Literal["l1", "operations", "faults"]] = {
    "owner of the device pages": "l1",
    "operations": "operations",
    "faults": "faults",
}


def explore(
    seeds: range,
    *,
    ranks: int = 2,
    steps: int = 100,
    profile: str = "mixed",
    depth: int | None = None,
    l1: str = BOTH,
    processes: int = 2,
) -> Report:
    """Run the schedule of every seed and return the report.

    Depth None takes both pipeline depths in turn, by the seed, and the seed also draws who owns the
    device pages unless `l1` says it. Raises `ValueError` for sizes or a
    profile that cannot be. A violation does not raise: it is in the report.
    """
    began = time.perf_counter()
    run = partial(_run, ranks=ranks, steps=steps, profile=profile, depth=depth, l1=l1)
    results = list(_results(run, seeds, processes))
    elapsed_s = time.perf_counter() - began
    return _report(results, elapsed_s)


def print_report(report: Report) -> None:
    """Print what a person wants to know of `report`: the counts, then each violation."""
    print(
        f"{report['schedules']} schedules, {report['steps']} steps, {report['rounds']} rounds, "
        f"{report['epochs']} epochs, {report['schedules_per_s']:.1f} schedules/s, "
        f"at most {report['collectives_per_step_max']} collective per step and rank"
    )
    for title, name in _PRINTED.items():
        counts = report[name]
        print(f"{title}: " + (", ".join(f"{key} {n}" for key, n in counts.items()) or "none"))
    for violation in report["violations"]:
        print(f"seed {violation['seed']}, step {violation['step']}: {violation['what']}")
        print(f"  replay: {violation['replay']}")
    if not report["violations"]:
        print("no violation")


def _run(
    seed: int, *, ranks: int, steps: int, profile: str, depth: int | None, l1: str
) -> ScheduleResult:
    chosen = seed % 2 if depth is None else depth
    with _quiet_log():
        return run_schedule(seed, ranks=ranks, steps=steps, profile=profile, depth=chosen, l1=l1)


@contextmanager
def _quiet_log() -> Generator[None]:
    """Keep the faults that are simulated out of the log: they are not news."""
    log = logging.getLogger("lockstep")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _results(
    run: "partial[ScheduleResult]", seeds: range, processes: int
) -> Iterator[ScheduleResult]:
    if processes <= 1 or len(seeds) < 8:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(run, seeds, chunksize=max(1, min(16, len(seeds) // (4 * processes))))


def _report(results: Iterable[ScheduleResult], elapsed_s: float) -> Report:
    counters = {
        name: Counter[str]() for name in ("l1", "operations", "outcomes", "faults", "coverage")
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
        counters["operations"] += result.operations
        counters["outcomes"] += result.outcomes
        counters["faults"] += result.faults
        counters["coverage"] += result.coverage
        if result.violation is not None:
            violations.append(result.violation)
    return Report(
        schedules=schedules,
        l1=_sorted(counters["l1"]),
        steps=steps,
        rounds=rounds,
        epochs=epochs,
        collectives_per_step_max=collectives_max,
        operations=_sorted(counters["operations"]),
        outcomes=_sorted(counters["outcomes"]),
        faults=_sorted(counters["faults"]),
        coverage=_sorted(counters["coverage"]),
        violations=[
            ReportedViolation(seed=each.seed, step=each.step, what=each.what, replay=each.replay)
            for each in violations
        ],
        schedules_per_s=schedules / elapsed_s if elapsed_s else 0.0,
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
