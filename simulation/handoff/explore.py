"""Exploring schedules of two groups: many seeds, and one report."""

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Literal, TypedDict

from ..epoch import SOUND_BUILD
from ..explore import (
    ReportedViolation,
    in_order,
    print_revived,
    print_violations,
    reported,
)
from ..revived.revived import RevivedBug
from ..seeds import quiet_log, run_all
from .schedule import HandoffResult, run_handoff_schedule


class HandoffReport(TypedDict):
    """What an exploration has done, ready for JSON."""

    revived: str | None
    """The bug that was put back, or None. With one, the exploration ends at the first violation."""
    schedules: int
    steps: int
    pairs: dict[str, int]
    """How many schedules there were for each pair of TP sizes, prefill first."""
    profiles: dict[str, int]
    ways: dict[str, int]
    """How pages went: directly or by the store."""
    faults: dict[str, int]
    requests: int
    served: int
    handoffs: dict[str, int]
    """How requests have come, by outcome."""
    departures: dict[str, int]
    """How offers have ended."""
    refusals: dict[str, int]
    coverage: dict[str, int]
    violations: list[ReportedViolation]
    schedules_per_s: float


_Counts = Literal["pairs", "profiles", "ways", "handoffs", "departures", "refusals", "faults"]
_PRINTED: dict[str, _Counts] = {
    "TP sizes": "pairs",
    "models": "profiles",
    "pages went": "ways",
    "handoffs": "handoffs",
    "offers": "departures",
    "refused": "refusals",
    "faults": "faults",
}


def explore_handoffs(
    seeds: range,
    *,
    prefill_ranks: int | None = None,
    decode_ranks: int | None = None,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int | None = None,
    bug: RevivedBug | None = None,
    processes: int = 2,
) -> HandoffReport:
    """Run the schedule of every seed and return the report.

    The seed draws what is not given. With a `bug` put back, stop at the first seed, in their order,
    whose schedule has a violation. A violation does not raise: it is in the report.
    """
    began = time.perf_counter()
    run = partial(
        _run,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        profile=profile,
        faults=faults,
        depth=depth,
        bug=bug,
    )
    results = list(run_all(run, seeds, processes, until_found=bug is not None))
    return _report(results, time.perf_counter() - began, None if bug is None else bug.name)


def print_handoff_report(report: HandoffReport, bug: RevivedBug | None = None) -> None:
    """Print what a person wants to know of `report`: the counts, then each violation."""
    if bug is not None:
        print_revived(bug, report["violations"], report["schedules"], report["steps"])
        return
    print(
        f"{report['schedules']} schedules of two groups, {report['steps']} steps,"
        f" {report['served']} of {report['requests']} requests served,"
        f" {report['schedules_per_s']:.1f} schedules/s"
    )
    for title, name in _PRINTED.items():
        counts = report[name]
        print(f"{title}: " + (", ".join(f"{key} {n}" for key, n in counts.items()) or "none"))
    print_violations(report["violations"])


def _run(
    seed: int,
    *,
    prefill_ranks: int | None,
    decode_ranks: int | None,
    profile: str | None,
    faults: str,
    depth: int | None,
    bug: RevivedBug | None,
) -> HandoffResult:
    build = SOUND_BUILD if bug is None else bug.build()
    with quiet_log():
        return run_handoff_schedule(
            seed,
            prefill_ranks=prefill_ranks,
            decode_ranks=decode_ranks,
            profile=profile,
            faults=faults,
            depth=depth,
            build=build,
        )


def _report(
    results: Iterable[HandoffResult], elapsed_s: float, revived: str | None
) -> HandoffReport:
    results = list(results)

    def sums(counts: Iterable[Counter[str]]) -> dict[str, int]:
        total = Counter[str]()
        for each in counts:
            total += each
        return in_order(total)

    found = [each.violation for each in results if each.violation is not None]
    return HandoffReport(
        revived=revived,
        schedules=len(results),
        steps=sum(each.steps for each in results),
        pairs=in_order(Counter(each.pair for each in results)),
        profiles=in_order(Counter(each.profile for each in results)),
        ways=in_order(Counter(each.way for each in results)),
        faults=sums(each.faults for each in results),
        requests=sum(each.requests for each in results),
        served=sum(each.served for each in results),
        handoffs=sums(each.outcomes for each in results),
        departures=sums(each.departures for each in results),
        refusals=sums(each.refusals for each in results),
        coverage=sums(each.coverage for each in results),
        violations=[reported(each, revived) for each in found],
        schedules_per_s=len(results) / elapsed_s if elapsed_s else 0.0,
    )
