"""Timelines as Chrome's trace events, which Perfetto (https://ui.perfetto.dev) opens.

A process of the file is a rank. Its threads are the engine's, the rounds, copies by direction, and each
store; where several copies or calls run side by side they are dealt out to as many threads. Requests
and operations, which overlap, are asynchronous slices. An arrow leads from each wait for a round to the
step of the rank that voted last.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from ..ranks.protocol.orders import Direction
from ..ranks.protocol.timed_events import PagesCopied, RoundHeld, StepHalf, StoreCalled
from ..version import VERSION
from .clocks import Alignment, align
from .kept_events import RankEvents
from .lives import lives

Timed = TypeVar("Timed", PagesCopied, StoreCalled)
TraceEvent = dict[str, Any]

_TIDS: Final = 1000
"""So many threads a rank may have; more share the last one's number."""
_WAYS: Final = {
    Direction.TO_HOST: ("device", "host"),
    Direction.TO_DEVICE: ("host", "device"),
}


def trace_text(ranks: Sequence[RankEvents]) -> str:
    """Return the timelines of all ranks as one JSON object, an event a line."""
    drawn = _drawn(ranks)
    head = {
        "displayTimeUnit": "ms",
        "otherData": {
            "version": f"lockstep {VERSION}",
            "clock": "microseconds since the first event, on the clock of the first rank",
            "ranks": [each.told() for each in drawn],
        },
    }
    events = [event for each in drawn for event in each.events]
    events += _arrows(drawn)
    lines = ",\n".join(map(json.JSONEncoder(separators=(",", ":")).encode, events))
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'


@dataclass(frozen=True, slots=True)
class _LastVote:
    """The vote that all others of a round waited for."""

    rank: int
    at_ns: int
    first_ns: int
    """When the first rank voted."""


@dataclass(slots=True)
class _Drawn:
    """One rank in the file."""

    pid: int
    kept: RankEvents
    clock: Alignment
    origin_s: float
    votes: dict[int, _LastVote]
    """By round; the same for all ranks."""
    events: list[TraceEvent] = field(default_factory=list[TraceEvent])
    tids: int = 0

    def ns(self, at_s: float) -> int:
        """Return a time as nanoseconds on the file's clock."""
        return round((self.clock.on_reference(at_s) - self.origin_s) * 1e9)

    def thread(self, name: str) -> int:
        """Return the number of another thread."""
        self.tids = min(self.tids + 1, _TIDS - 1)
        tid = self.pid * _TIDS + self.tids
        self.tell("thread_name", {"name": name}, tid)
        self.tell("thread_sort_index", {"sort_index": self.tids}, tid)
        return tid

    def tell(self, name: str, args: dict[str, Any], tid: int = 0) -> None:
        """Say something of the process, or of one thread."""
        self.events.append({"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args})

    def slice(self, tid: int, name: str, began_s: float, ended_s: float, **args: Any) -> None:
        """Draw what took some time on a thread."""
        began_ns = self.ns(began_s)
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "pid": self.pid,
                "tid": tid,
                "ts": began_ns / 1000,
                "dur": (self.ns(ended_s) - began_ns) / 1000,
                "args": args,
            }
        )

    def told(self) -> dict[str, Any]:
        """Return what the file says of this rank as a whole."""
        error_s = self.clock.error_s
        return {
            "pid": self.pid,
            "rank": self.kept.rank,
            "events": len(self.kept.events),
            "events_left_out": self.kept.left_out,
            "clock_read_by": self.clock.how,
            "clock_error_us": None if error_s is None else round(error_s * 1e6, 3),
        }


def _drawn(ranks: Sequence[RankEvents]) -> list[_Drawn]:
    """Return all ranks, drawn but for what leads from one to another."""
    clocks = align(ranks)
    origin_s = min(
        (
            clocks[rank.clock].on_reference(_began_s(event))
            for rank in ranks
            for event in rank.events
        ),
        default=0.0,
    )
    votes: dict[int, _LastVote] = {}
    drawn = [
        _Drawn(pid, rank, clocks[rank.clock], origin_s, votes) for pid, rank in enumerate(ranks)
    ]
    votes |= _last_votes(drawn)
    for each in drawn:
        _draw(each)
    return drawn


def _began_s(event: tuple[Any, ...]) -> float:
    match event:
        case RoundHeld():
            return event.voted_s
        case StepHalf() | PagesCopied() | StoreCalled():
            return event.began_s
        case _:
            at_s: float = event[-1]
            return at_s


def _last_votes(group: Sequence[_Drawn]) -> dict[int, _LastVote]:
    votes: dict[int, list[tuple[int, int]]] = {}
    for each in group:
        for event in each.kept.events:
            if isinstance(event, RoundHeld):
                votes.setdefault(event.number, []).append((each.ns(event.voted_s), each.kept.rank))
    return {
        number: _LastVote(max(voted)[1], max(voted)[0], min(voted)[0])
        for number, voted in votes.items()
        if len(voted) == len(group)
    }


def _draw(rank: _Drawn) -> None:
    name = f"rank {rank.kept.rank}"
    rank.tell("process_name", {"name": name})
    rank.tell("process_sort_index", {"sort_index": rank.pid})
    engine, rounds = rank.thread("engine"), rank.thread("rounds")
    copies: dict[str, list[PagesCopied]] = {}
    calls: dict[str, list[StoreCalled]] = {}
    for event in rank.kept.events:
        match event:
            case StepHalf(step, launches, began_s, ended_s):
                half = "launch" if launches else "verdict"
                rank.slice(engine, "step", began_s, ended_s, step=step, half=half)
            case RoundHeld():
                _draw_round(rank, event, engine, rounds)
            case PagesCopied():
                copies.setdefault(f"copies {event.direction}", []).append(event)
            case StoreCalled():
                calls.setdefault(f"store {event.store}", []).append(event)
            case _:
                pass
    for thread, copied in sorted(copies.items()):
        _draw_side_by_side(rank, thread, copied, _draw_copy)
    for thread, called in sorted(calls.items()):
        _draw_side_by_side(rank, thread, called, _draw_call)
    rank.events += lives(rank.kept.events, rank.pid, rank.ns)


def _draw_round(rank: _Drawn, event: RoundHeld, engine: int, rounds: int) -> None:
    about: dict[str, Any] = {"round": event.number}
    last = rank.votes.get(event.number)
    if last is not None:
        about["last_rank"] = last.rank
        about["last_vote_us_after_first"] = (last.at_ns - last.first_ns) / 1000
    rank.slice(rounds, "round", event.voted_s, event.ended_s, **about)
    rank.slice(engine, "wait for round", event.awaited_s, event.ended_s, **about)


def _draw_side_by_side(
    rank: _Drawn,
    name: str,
    events: Iterable[Timed],
    draw: Callable[[_Drawn, int, Timed], None],
) -> None:
    """Draw what may overlap on as many threads as it takes, each of which has one at a time."""
    free_at: list[float] = []
    lanes: list[int] = []
    for event in sorted(events, key=lambda each: each.began_s):
        lane = next((at for at, free_s in enumerate(free_at) if free_s <= event.began_s), None)
        if lane is None:
            lane = len(lanes)
            lanes.append(rank.thread(name if not lane else f"{name} #{lane + 1}"))
            free_at.append(0.0)
        free_at[lane] = event.ended_s
        draw(rank, lanes[lane], event)


def _draw_copy(rank: _Drawn, tid: int, event: PagesCopied) -> None:
    source, destination = _WAYS[Direction(event.direction)]
    rank.slice(
        tid,
        f"copy {event.direction}",
        event.began_s,
        event.ended_s,
        source=source,
        destination=destination,
        pages=event.pages,
        bytes=event.nbytes,
        ok=event.ok,
        operation=event.operation,
    )


def _draw_call(rank: _Drawn, tid: int, event: StoreCalled) -> None:
    rank.slice(
        tid,
        event.call,
        event.began_s,
        event.ended_s,
        store=event.store,
        pool=event.pool,
        keys=sum(event.outcomes.values()),
        bytes=event.nbytes,
        outcomes=event.outcomes,
        operation=event.operation,
    )


def _arrows(drawn: Sequence[_Drawn]) -> Iterator[TraceEvent]:
    """Yield an arrow from each wait for a round to the last vote, where that came after it began."""
    number = 0
    voters = {each.kept.rank: each for each in drawn}
    for each in drawn:
        for event in each.kept.events:
            if not isinstance(event, RoundHeld):
                continue
            last = each.votes.get(event.number)
            awaited_ns = each.ns(event.awaited_s)
            if last is None or last.rank == each.kept.rank or last.at_ns < awaited_ns:
                continue
            number += 1
            arrow = {"name": "waits for", "cat": "round", "id": number}
            voter = voters[last.rank]
            # Perfetto lets an arrow begin at whichever of its slices began first, which is the wait.
            yield arrow | _at(each, awaited_ns) | {"ph": "s"}
            yield arrow | _at(voter, max(last.at_ns, awaited_ns + 1)) | {"ph": "f", "bp": "e"}


def _at(rank: _Drawn, at_ns: int) -> TraceEvent:
    return {"pid": rank.pid, "tid": rank.pid * _TIDS + 1, "ts": at_ns / 1000}
