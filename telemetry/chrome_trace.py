"""Writes timelines as Chrome trace events, which Perfetto (https://ui.perfetto.dev) opens.

The trace file shows each rank as a process. The process's threads are the engine, the rounds, copies by
direction, and each store; concurrent copies or calls use several threads. Requests and operations
overlap, so they are asynchronous slices. An arrow leads from each wait for a round to the step of the
rank that voted last.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..version import VERSION
from .clocks import Alignment, align
from .kept_events import RankEvents
from .tracer import ENGINE, OPERATION, REQUEST, ROUND, ROUNDS, WAIT, Span, Tracer

TraceEvent = dict[str, Any]

_TIDS: Final = 1000
"""The maximum number of trace threads per rank. Further threads share the last thread's number."""


def trace_text(ranks: Sequence[RankEvents]) -> str:
    """Return the timelines of all ranks as one JSON object, one event per line."""
    clocks = align(ranks)
    drawn = [
        _Drawn(pid, kept, clocks[kept.clock], Tracer(kept.rank).all_of(kept.events))
        for pid, kept in enumerate(ranks)
    ]
    began_s = (each.clock.on_reference(span.began_s) for each in drawn for span in each.spans)
    origin_s = min(began_s, default=0.0)
    for each in drawn:
        each.origin_s = origin_s
    votes = _last_votes(drawn)
    events = [event for each in drawn for event in each.draw(votes)]
    events += _arrows(drawn, votes)
    head = {
        "displayTimeUnit": "ms",
        "otherData": {
            "version": f"lockstep {VERSION}",
            "clock": "microseconds since the first event, on the clock of the first rank",
            "ranks": [each.about() for each in drawn],
        },
    }
    lines = ",\n".join(map(json.JSONEncoder(separators=(",", ":")).encode, events))
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'


class _LastVote(NamedTuple):
    """The last vote of a round; all other ranks waited for this vote."""

    at_ns: int
    rank: int
    pid: int
    first_ns: int
    """The time of the round's first vote, on the trace file's clock."""


@dataclass(slots=True)
class _Drawn:
    """One rank's data while its spans are converted to trace events."""

    pid: int
    kept: RankEvents
    clock: Alignment
    spans: list[Span]
    origin_s: float = 0.0
    tids: int = 0
    events: list[TraceEvent] = field(default_factory=list[TraceEvent])

    def ns(self, at_s: float) -> int:
        """Convert a time of this rank's clock to nanoseconds on the trace file's clock."""
        return round((self.clock.on_reference(at_s) - self.origin_s) * 1e9)

    def about(self) -> dict[str, Any]:
        """Return the trace file's metadata about this rank."""
        error_s = self.clock.error_s
        return {
            "pid": self.pid,
            "rank": self.kept.rank,
            "events": len(self.kept.events),
            "events_left_out": self.kept.left_out,
            "clock_read_by": self.clock.how,
            "clock_error_us": None if error_s is None else round(error_s * 1e6, 3),
        }

    def draw(self, votes: Mapping[int, _LastVote]) -> list[TraceEvent]:
        """Return all trace events of this rank except the arrows to other ranks."""
        self._add_metadata("process_name", {"name": f"rank {self.kept.rank}"})
        self._add_metadata("process_sort_index", {"sort_index": self.pid})
        tracks: dict[str, list[Span]] = {ENGINE: [], ROUNDS: []}
        for number, span in enumerate(self.spans, 1):
            if (last := votes.get(span.attributes.get("round", 0))) is not None:
                span.attributes["last_rank"] = last.rank
                span.attributes["last_vote_us_after_first"] = (last.at_ns - last.first_ns) / 1000
            if span.track in (OPERATION, REQUEST):
                self._draw_life(span, f"0x{number:x}")
            else:
                tracks.setdefault(span.track, []).append(span)
        for track in (ENGINE, ROUNDS):
            # Use one thread for the engine's spans, and one for the spans of rounds. Spans of one such
            # thread are nested or disjoint.
            tid = self._thread(track)
            for span in tracks.pop(track):
                self._draw_slice(span, tid)
        for track, spans in sorted(tracks.items()):
            self._draw_side_by_side(track, spans)
        return self.events

    def _thread(self, name: str) -> int:
        """Add a thread to the rank's process in the trace file and return the thread's number."""
        self.tids = min(self.tids + 1, _TIDS - 1)
        tid = self.pid * _TIDS + self.tids
        self._add_metadata("thread_name", {"name": name}, tid)
        self._add_metadata("thread_sort_index", {"sort_index": self.tids}, tid)
        return tid

    def _add_metadata(self, name: str, args: dict[str, Any], tid: int = 0) -> None:
        """Add a metadata event for the rank's process, or for one of its threads."""
        self._add("M", name, tid, args=args)

    def _add(self, ph: str, name: str, tid: int = 0, **more: Any) -> None:
        self.events.append({"ph": ph, "name": name, "pid": self.pid, "tid": tid, **more})

    def _draw_slice(self, span: Span, tid: int) -> None:
        assert span.ended_s is not None
        began_ns = self.ns(span.began_s)
        dur = (self.ns(span.ended_s) - began_ns) / 1000
        self._add("X", span.name, tid, ts=began_ns / 1000, dur=dur, args=span.attributes)

    def _draw_side_by_side(self, track: str, spans: Iterable[Span]) -> None:
        """Draw spans, some of which may overlap, on enough trace threads to avoid overlaps."""
        free_at: list[float] = []
        tids: list[int] = []
        for span in sorted(spans, key=lambda each: each.began_s):
            lane = next((at for at, free_s in enumerate(free_at) if free_s <= span.began_s), None)
            if lane is None:
                lane = len(tids)
                tids.append(self._thread(track if not lane else f"{track} #{lane + 1}"))
                free_at.append(0.0)
            free_at[lane] = span.ended_s or 0.0
            self._draw_slice(span, tids[lane])

    def _draw_life(self, span: Span, number: str) -> None:
        """Draw a request, or an operation with its phases. An unfinished span gets no end event."""

        def add(ph: str, name: str, at_s: float, **more: Any) -> None:
            ts, local = self.ns(at_s) / 1000, {"local": number}
            self._add(ph, name, cat=span.track, id2=local, ts=ts, **more)

        add("b", span.name, span.began_s, args=span.attributes)
        if span.track == REQUEST:
            for name, at_s, attributes in span.marks:
                add("n", name, at_s, args=attributes)
        else:
            ends = [*(mark.at_s for mark in span.marks[1:]), span.ended_s]
            for mark, ended_s in zip(span.marks, ends, strict=True):
                add("b", mark.name, mark.at_s)
                if ended_s is not None:
                    add("e", mark.name, ended_s)
        if span.ended_s is not None:
            add("e", span.name, span.ended_s)


def _last_votes(drawn: Sequence[_Drawn]) -> dict[int, _LastVote]:
    """Return, for each round that all ranks recorded, its last vote."""
    votes: dict[int, list[tuple[int, int, int]]] = {}
    for each in drawn:
        for span in each.spans:
            if span.name == ROUND:
                voted = (each.ns(span.began_s), each.kept.rank, each.pid)
                votes.setdefault(span.attributes["round"], []).append(voted)
    return {
        number: _LastVote(*max(voted), min(voted)[0])
        for number, voted in votes.items()
        if len(voted) == len(drawn)
    }


def _arrows(drawn: Sequence[_Drawn], votes: Mapping[int, _LastVote]) -> Iterator[TraceEvent]:
    """Yield an arrow from each wait to its round's last vote, if the wait began before that vote."""
    number = 0
    for each in drawn:
        for span in each.spans:
            last = votes.get(span.attributes["round"]) if span.name == WAIT else None
            awaited_ns = each.ns(span.began_s)
            if last is None or last.pid == each.pid or last.at_ns < awaited_ns:
                continue
            number += 1
            arrow = {"name": "waits for", "cat": "round", "id": number}
            # Begin the arrow at the wait, because Perfetto draws arrows from the earlier slice to the
            # later one.
            yield arrow | _at(each.pid, awaited_ns) | {"ph": "s"}
            yield arrow | _at(last.pid, max(last.at_ns, awaited_ns + 1)) | {"ph": "f", "bp": "e"}


def _at(pid: int, at_ns: int) -> TraceEvent:
    return {"pid": pid, "tid": pid * _TIDS + 1, "ts": at_ns / 1000}
