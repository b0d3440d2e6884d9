"""Reads a trace file in Chrome's trace format, as a trace viewer would."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
OUTCOME = "lockstep.operation.outcome"


@dataclass(frozen=True)
class Slice:
    """A complete event of the trace: a span of time on one thread, in nanoseconds."""

    pid: int
    thread: str
    name: str
    began: int
    ended: int
    args: Mapping[str, Any]


class TraceFile:
    """The events of a trace file, grouped by their type."""

    def __init__(self, text: str) -> None:
        record = json.loads(text)
        self.events: list[Event] = record["traceEvents"]
        self.about: Mapping[str, Any] = record["otherData"]
        self.processes = self._named("process_name")
        threads = {
            (each["pid"], each["tid"]): each["args"]["name"]
            for each in self.events
            if each["name"] == "thread_name"
        }
        self.slices = [
            Slice(
                pid=each["pid"],
                thread=threads[each["pid"], each["tid"]],
                name=each["name"],
                began=_ns(each["ts"]),
                ended=_ns(each["ts"]) + _ns(each["dur"]),
                args=each["args"],
            )
            for each in self.events
            if each["ph"] == "X"
        ]

    @classmethod
    def read(cls, path: Path) -> "TraceFile":
        return cls(path.read_text(encoding="utf-8"))

    def named(self, name: str) -> list[Slice]:
        return sorted((e for e in self.slices if e.name == name), key=lambda each: each.began)

    def rounds(self) -> dict[int, dict[int, Slice]]:
        """Return the slices of all rounds, keyed by round number and then by process id."""
        rounds: defaultdict[int, dict[int, Slice]] = defaultdict(dict)
        for each in self.named("round"):
            rounds[each.args["round"]][each.pid] = each
        return dict(rounds)

    def crossings(self) -> list[tuple[Slice, Slice]]:
        """Return the pairs of slices on one thread that overlap without one containing the other."""
        threads: defaultdict[tuple[int, str], list[Slice]] = defaultdict(list)
        for each in self.slices:
            threads[each.pid, each.thread].append(each)
        return [pair for slices in threads.values() for pair in _crossings(slices)]

    def operations(self, pid: int) -> dict[str, dict[str, int]]:
        """Return how many operations of process `pid` have ended, keyed by kind and then by outcome."""
        ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for each in self.events:
            outcome = each.get("args", {}).get(OUTCOME) if each["ph"] == "b" else None
            if each["pid"] == pid and outcome is not None:
                ended[each["name"].removeprefix("lockstep.")][outcome] += 1
        return {kind: dict(outcomes) for kind, outcomes in ended.items()}

    def lives(self, category: str) -> dict[tuple[int, str], list[Event]]:
        """Return the asynchronous events of a category by process and id, in file order."""
        lives: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
        for each in self.events:
            if each.get("cat") == category and "id2" in each:
                lives[each["pid"], each["id2"]["local"]].append(each)
        return dict(lives)

    def arrows(self) -> list[tuple[Event, Event]]:
        """Return each flow arrow of the trace as its start event and its end event."""
        begins = {each["id"]: each for each in self.events if each["ph"] == "s"}
        ends = {each["id"]: each for each in self.events if each["ph"] == "f"}
        assert begins.keys() == ends.keys()
        return [(begins[number], ends[number]) for number in begins]

    def _named(self, kind: str) -> dict[int, str]:
        return {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == kind}


def are_nested(life: Iterable[Event]) -> bool:
    """Return whether begin and end events nest properly and timestamps never decrease."""
    open_names: list[str] = []
    latest = 0.0
    for event in life:
        if event["ts"] < latest:
            return False
        latest = event["ts"]
        if event["ph"] == "b":
            open_names.append(event["name"])
        elif event["ph"] == "e" and (not open_names or open_names.pop() != event["name"]):
            return False
    return True


def _crossings(slices: list[Slice]) -> list[tuple[Slice, Slice]]:
    crossings: list[tuple[Slice, Slice]] = []
    holding: list[Slice] = []
    for each in sorted(slices, key=lambda each: (each.began, -each.ended)):
        while holding and holding[-1].ended <= each.began:
            holding.pop()
        if holding and each.ended > holding[-1].ended:
            crossings.append((holding[-1], each))
        holding.append(each)
    return crossings


def _ns(us: float) -> int:
    return round(us * 1000)
