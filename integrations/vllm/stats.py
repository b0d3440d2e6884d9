"""Changes of a cache's statistics since the last report, as plain numbers for vLLM.

A report is a nested dict. Families and labels are those of `telemetry.families`:

    name of a family -> label values (the rank first), joined by commas -> number

The number is the increment of a counter, or the new value of a changed gauge. For a histogram, the
report has a list instead: the increment of the sum, then the increments of all buckets.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from ...storage_backends.latencies import BOUNDS_S, Histogram
from ...telemetry.families import FAMILIES, Family, Labels, Type

REPORT_EVERY_S: Final = 1.0
"""Minimum seconds between two reports of a busy engine. An engine that becomes idle reports at once."""

Number = int | float
StatsReport = dict[str, dict[str, Any]]
"""A report: changes by family and labels. A histogram's change is [sum, count of each bucket...]."""


class Restored:
    """Counts the tokens of loads from the cache, by outcome."""

    def __init__(self) -> None:
        self.tokens = {"saved": 0, "failed": 0, "dropped": 0}
        """Tokens by outcome: `saved` (loaded), `failed`, or `dropped` (the request finished before its
        load)."""
        self._loading: dict[str, int] = {}

    def begun(self, request: str, tokens: int) -> None:
        """Record that a request's load of `tokens` tokens has started."""
        self._loading[request] = tokens

    def ended(self, outcome: str, requests: Iterable[str]) -> None:
        """Add the tokens of these requests' loads to `outcome`; each load is counted only once."""
        for request in requests:
            self.tokens[outcome] += self._loading.pop(request, 0)


RESTORED: Final[Family[Restored]] = Family(
    "restored_tokens",
    ("outcome",),
    Type.COUNTER,
    lambda counted: counted.tokens,
    "Tokens that requests began to load, by outcome: saved, failed, dropped.",
)

ALL: Final[Mapping[str, Family[Any]]] = {
    **{each.name: each for each in FAMILIES},
    RESTORED.name: RESTORED,
}
"""All families of statistics that are reported to vLLM, by name."""


class StatsFeed:
    """Computes the changes of statistics since the last report."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()
        self._before: dict[tuple[str, str], Any] = {}

    def due(self, *, idle: bool) -> bool:
        """Return whether a report is due: an interval has passed, or the engine has become idle."""
        now = self._clock()
        if now < self._due and not idle:
            return False
        self._due = now + REPORT_EVERY_S
        return True

    def report(
        self, statistics: Iterable[tuple[Family[Any], Iterable[tuple[Labels, Number | Histogram]]]]
    ) -> StatsReport:
        """Return a report of the changes in these families; a sample's first label is the rank."""
        report: StatsReport = {}
        gone = {each for each in self._before if ALL[each[0]].type is Type.GAUGE}
        for family, samples in statistics:
            for labels, value in samples:
                where = family.name, ",".join(labels)
                gone.discard(where)
                self._add_change(report, where, family.type, value)
        for where in gone:
            # Report 0 for a gauge that had a sample in the last report and has none now.
            self._add_change(report, where, Type.GAUGE, 0)
        return report

    def _add_change(
        self, report: StatsReport, where: tuple[str, str], of: Type, value: float | Histogram
    ) -> None:
        before = self._before.get(where)
        if value == before:
            return
        self._before[where] = value
        added: Any = value
        if isinstance(value, Histogram):
            new = value if before is None else value.since(before)
            added = [new.sum_s, *new.counts]
        elif of is Type.COUNTER and before is not None:
            added = value - before
        report.setdefault(where[0], {})[where[1]] = added


def add(one: StatsReport, other: StatsReport) -> StatsReport:
    """Return the sum of two reports. The value of a gauge is that of `other`, the later report."""
    both: StatsReport = {name: {**values} for name, values in one.items()}
    for name, values in other.items():
        family, into = ALL[name], both.setdefault(name, {})
        for labels, value in values.items():
            before = into.get(labels)
            if before is None or family.type is Type.GAUGE:
                into[labels] = value
            elif family.type is Type.HISTOGRAM:
                into[labels] = [each + more for each, more in zip(before, value, strict=True)]
            else:
                into[labels] = before + value
    return both


def spread(histogram: list[Number]) -> Iterator[tuple[float, int]]:
    """Yield observations as (value, count) that give a histogram the reported sum and bucket counts.

    All values of one bucket are equal.
    """
    sum_s, counts = float(histogram[0]), [int(each) for each in histogram[1:]]
    lows = (0.0, *BOUNDS_S)
    highs = (*BOUNDS_S, max(sum_s, BOUNDS_S[-1]))
    least = sum(count * low for count, low in zip(counts, lows, strict=True))
    room = sum(count * (high - low) for count, low, high in zip(counts, lows, highs, strict=True))
    share = min(1.0, max(1e-9, (sum_s - least) / room)) if room else 1.0
    for count, low, high in zip(counts, lows, highs, strict=True):
        if count:
            yield min(high, low + share * (high - low)), count


def line(report: StatsReport) -> dict[str, Number]:
    """Return a line about a report for vLLM's log; values of rare events are left out if they are 0."""

    def total(name: str, *labels: str) -> Number:
        found: dict[str, Number] = report.get(name, {})
        begins = [*labels]
        return sum(
            value
            for joined, value in found.items()
            if joined.split(",")[1 : 1 + len(labels)] == begins
        )

    entries: dict[str, Number] = {
        "requested tokens": total("asked_tokens"),
        "hit on device": total("hit_tokens", "device"),
        "hit in host memory": total("hit_tokens", "host"),
        "hit in storage": total("hit_tokens", "storage"),
        "restored tokens": total("restored_tokens", "saved"),
    }
    seldom: dict[str, Number] = {
        "hit on peers": total("hit_tokens", "peer"),
        "failed tokens": total("restored_tokens", "failed"),
        "failed loads": total("operations", "load_back", "failed"),
        "missed pages": total("missed_pages"),
        "corrupt pages": total("corrupt_pages"),
        "late calls": total("storage_late_calls"),
        "in flight": total("operations_in_flight"),
        **{
            f"MB {source} to {destination}": round(
                total("moved_bytes", source, destination) / 1e6, 3
            )
            for source, destination in (
                *(("device", "host"), ("host", "device")),
                *(("host", "storage"), ("storage", "host")),
            )
        },
    }
    entries |= {name: value for name, value in seldom.items() if value}
    steps = [*report.get("step_seconds", {}).values()]
    if taken := sum(sum(each[1:]) for each in steps):
        entries["us a step"] = round(sum(each[0] for each in steps) / taken * 1e6, 1)
    return entries
