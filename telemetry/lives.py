"""The lives of operations and requests as asynchronous slices of a trace."""

from collections.abc import Callable, Container, Iterable
from typing import Any, Final

from ..ranks.protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    RequestAdmitted,
    RequestReleased,
    TimedEvent,
)

_BEGIN_A_REQUEST: Final = ("prefetch", "load_back")


def belongs(event: OperationBegan, requests: Container[str]) -> bool:
    """Say whether an operation is part of a request's life, with `requests` those that have begun.

    What is still written for one that was let go of is not.
    """
    return event.request in requests or bool(event.request and event.kind in _BEGIN_A_REQUEST)


def lives(
    events: Iterable[TimedEvent], pid: int, ns: Callable[[float], int]
) -> list[dict[str, Any]]:
    """Return the slices of one rank, whose times `ns` turns into nanoseconds of the trace.

    An operation's has those of its phases in it. What has not ended stays open; of what began before
    the first event that was kept there is nothing.
    """
    drawn = _Lives(pid, ns)
    for event in events:
        match event:
            case OperationBegan():
                drawn.begin_operation(event)
            case OperationMoved(operation, phase, at_s):
                drawn.move(operation, phase, at_s)
            case OperationEnded():
                drawn.end_operation(event)
            case RequestAdmitted():
                drawn.admit(event)
            case RequestReleased(request, at_s):
                drawn.release(request, at_s)
            case _:
                pass
    return drawn.slices


class _Lives:
    """Draws the lives of one rank."""

    def __init__(self, pid: int, ns: Callable[[float], int]) -> None:
        self.slices: list[dict[str, Any]] = []
        self._pid = pid
        self._ns = ns
        self._kinds: dict[int, str] = {}
        """Of each operation that has begun."""
        self._phases: dict[int, str] = {}
        self._requests: dict[str, int] = {}
        """The number of each request that has begun, since names come again."""
        self._next_request = 1

    def begin_operation(self, event: OperationBegan) -> None:
        if belongs(event, self._requests):
            self._begin_request(event.request, event.at_s)
        kind = self._kinds[event.operation] = event.kind
        life = ("operation", event.operation)
        self._add("b", life, kind, event.at_s, operation=event.operation, request=event.request)
        self._begin_phase(event.operation, event.phase, event.at_s)

    def move(self, operation: int, phase: str, at_s: float) -> None:
        if operation in self._kinds:
            self._end_phase(operation, at_s)
            self._begin_phase(operation, phase, at_s)

    def end_operation(self, event: OperationEnded) -> None:
        kind = self._kinds.pop(event.operation, None)
        if kind is not None:
            self._end_phase(event.operation, event.at_s)
            life = ("operation", event.operation)
            self._add("e", life, kind, event.at_s, outcome=event.outcome)

    def admit(self, event: RequestAdmitted) -> None:
        number = self._begin_request(event.request, event.at_s)
        args = event._asdict()
        del args["at_s"]
        self._add("n", ("request", number), "admitted", event.at_s, **args)

    def release(self, request: str, at_s: float) -> None:
        number = self._requests.pop(request, None)
        if number is not None:
            self._add("e", ("request", number), "request", at_s)

    def _begin_request(self, request: str, at_s: float) -> int:
        number = self._requests.get(request)
        if number is None:
            number = self._requests[request] = self._next_request
            self._next_request += 1
            self._add("b", ("request", number), "request", at_s, request=request)
        return number

    def _begin_phase(self, operation: int, phase: str, at_s: float) -> None:
        self._phases[operation] = phase
        self._add("b", ("operation", operation), phase, at_s)

    def _end_phase(self, operation: int, at_s: float) -> None:
        self._add("e", ("operation", operation), self._phases.pop(operation), at_s)

    def _add(self, ph: str, life: tuple[str, int], name: str, at_s: float, **args: Any) -> None:
        cat, number = life
        self.slices.append(
            {
                "ph": ph,
                "cat": cat,
                "name": name,
                "id2": {"local": f"0x{number:x}"},
                "pid": self._pid,
                "tid": 0,
                "ts": self._ns(at_s) / 1000,
                "args": args,
            }
        )
