"""Spans of one rank's work, with the names and attributes that all exporters use.

This is the only module that turns timed events into spans. `chrome_trace` writes all spans to a file.
`spans` sends only the spans of requests to OpenTelemetry. Names follow OpenTelemetry's conventions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from ..ranks.protocol.orders import Direction
from ..ranks.protocol.timed_events import (
    WAYS,
    OperationBegan,
    OperationEnded,
    OperationMoved,
    PagesCopied,
    RequestAdmitted,
    RequestReleased,
    RoundHeld,
    StepHalf,
    StoreCalled,
    TimedEvent,
)

ENGINE: Final = "engine"
ROUNDS: Final = "rounds"
OPERATION: Final = "operation"
REQUEST: Final = "request"
REQUEST_ID: Final = "lockstep.request.id"
ROUND: Final = "round"
WAIT: Final = "wait for round"
_OPERATION_ID: Final = "lockstep.operation.id"
_BEGIN_A_REQUEST: Final = ("prefetch", "load_back")


class SpanEvent(NamedTuple):
    """A point in time within a span: the start of an operation's phase, or a request's admission."""

    name: str
    at_s: float
    attributes: Mapping[str, Any] = {}


@dataclass(slots=True, eq=False)
class Span:
    """A piece of work with begin and end.

    While the work is running, attributes and marks (points in time) may be added.
    """

    name: str
    track: str
    """The resource that the span occupies: engine, rounds, copies in one direction, or a store.

    Several spans of copies and stores may overlap. `OPERATION` and `REQUEST` occupy no resource.
    """
    began_s: float
    ended_s: float | None
    """The time at which the work ended; None while the work is running."""
    attributes: dict[str, Any]
    parent: "Span | None" = None
    """The enclosing span, of a request or an operation; None if there is none."""
    marks: list[SpanEvent] = field(default_factory=list[SpanEvent])


class Tracer:
    """Builds the spans of one rank. Work that began before the rank's first event is omitted."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._requests: dict[str, Span] = {}
        self._operations: dict[int, Span] = {}

    def all_of(self, events: Iterable[TimedEvent]) -> list[Span]:
        """Return the spans that these events begin or end, each once."""
        return list(dict.fromkeys(chain.from_iterable(map(self.spans, events))))

    def spans(self, event: TimedEvent) -> list[Span]:
        """Return the spans that an event begins or ends, parents before children."""
        match event:
            case StepHalf(step, launches, began_s, ended_s):
                half = "launch" if launches else "verdict"
                return [Span("step", ENGINE, began_s, ended_s, {"step": step, "half": half})]
            case RoundHeld(number, voted_s, awaited_s, ended_s):
                return [
                    Span(ROUND, ROUNDS, voted_s, ended_s, {"round": number}),
                    Span(WAIT, ENGINE, awaited_s, ended_s, {"round": number}),
                ]
            case PagesCopied():
                return [self._copy(event)]
            case StoreCalled():
                return [self._call(event)]
            case OperationBegan():
                return self._begin_operation(event)
            case OperationMoved(operation, phase, at_s):
                marks = self._marks(operation)
                if marks and marks[-1].name != phase:
                    marks.append(SpanEvent(phase, at_s))
                return []
            case OperationEnded(operation, _, outcome, at_s):
                return self._end_operation(operation, outcome, at_s)
            case RequestAdmitted():
                return self._admit(event)
            case RequestReleased(request, at_s):
                span = self._requests.pop(request, None)
                return [] if span is None else [_ended(span, at_s)]

    def _marks(self, operation: int) -> list[SpanEvent]:
        """Return the recorded phases of an operation; empty if its begin was not recorded."""
        span = self._operations.get(operation)
        return [] if span is None else span.marks

    def _copy(self, event: PagesCopied) -> Span:
        source, destination = WAYS[Direction(event.direction)]
        return Span(
            f"copy {event.direction}",
            f"copies {event.direction}",
            event.began_s,
            event.ended_s,
            {
                _OPERATION_ID: event.operation,
                "lockstep.source": source,
                "lockstep.destination": destination,
                "lockstep.pages": event.pages,
                "lockstep.bytes": event.nbytes,
                "lockstep.ok": event.ok,
            },
            self._operations.get(event.operation),
        )

    def _call(self, event: StoreCalled) -> Span:
        return Span(
            f"{event.call} {event.store}",
            f"store {event.store}",
            event.began_s,
            event.ended_s,
            {
                _OPERATION_ID: event.operation,
                "db.system.name": event.store,
                "db.operation.name": event.call,
                "db.operation.batch.size": sum(event.outcomes.values()),
                "lockstep.pool": event.pool,
                "lockstep.bytes": event.nbytes,
                **{f"lockstep.keys.{name}": keys for name, keys in event.outcomes.items()},
            },
            self._operations.get(event.operation),
        )

    def _begin_operation(self, event: OperationBegan) -> list[Span]:
        began: list[Span] = []
        # Begin a request's span only for a prefetch or load back, because writes may begin after the
        # request was released.
        if event.request and event.kind in _BEGIN_A_REQUEST:
            began = self._begin_request(event.request, event.at_s)
        attributes: dict[str, Any] = {_OPERATION_ID: event.operation, "lockstep.rank": self._rank}
        if event.request:
            attributes[REQUEST_ID] = event.request
        span = self._operations[event.operation] = Span(
            f"lockstep.{event.kind}",
            OPERATION,
            event.at_s,
            None,
            attributes,
            self._requests.get(event.request),
            [SpanEvent(event.phase, event.at_s)],
        )
        return [*began, span]

    def _end_operation(self, operation: int, outcome: str, at_s: float) -> list[Span]:
        span = self._operations.pop(operation, None)
        if span is None:
            return []
        span.attributes["lockstep.operation.outcome"] = outcome
        if outcome == "failed":
            span.attributes["error.type"] = outcome
        return [_ended(span, at_s)]

    def _admit(self, event: RequestAdmitted) -> list[Span]:
        hit = {
            "device": event.device_tokens,
            "host": event.host_tokens,
            "storage": event.storage_tokens,
        }
        attributes = {
            "gen_ai.usage.cache_read.input_tokens": sum(hit.values()),
            "lockstep.asked_tokens": event.tokens,
            **{f"lockstep.hit_tokens.{tier}": tokens for tier, tokens in hit.items()},
        }
        began = self._begin_request(event.request, event.at_s)
        span = self._requests[event.request]
        span.attributes |= attributes
        span.marks.append(SpanEvent("admitted", event.at_s, attributes))
        return began

    def _begin_request(self, request: str, at_s: float) -> list[Span]:
        """Begin the span of a request; return a list with the span, or [] if the request has a span."""
        if request in self._requests:
            return []
        attributes = {REQUEST_ID: request, "lockstep.rank": self._rank}
        span = self._requests[request] = Span("lockstep.request", REQUEST, at_s, None, attributes)
        return [span]


def _ended(span: Span, at_s: float) -> Span:
    span.ended_s = at_s
    return span
