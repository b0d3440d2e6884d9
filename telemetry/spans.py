"""OpenTelemetry spans of what a cache does for requests, for an engine whose operators trace it.

A request has a span from the first thing that the cache does for it until the engine lets go of it.
Its operations, such as prefetch and load back, are spans in it, and calls to stores are spans in those.
Steps, rounds and backups belong to no request, and have none: a timeline shows them (`chrome_trace`).

They go to whichever `TracerProvider` the program has set up, with its exporters and its sampling.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError
from ..ranks.protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    RequestAdmitted,
    RequestReleased,
    StoreCalled,
    TimedEvent,
)
from ..version import VERSION
from .lives import belongs

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

MISSING: Final = "spans need the package opentelemetry-sdk: pip install 'lockstep-kv[otel]'"


def _no_parent(request: str) -> "Context | None":
    del request
    return None


class Spans:
    """Makes spans of one rank's events; `note` is the timeline to open its cache with.

    Every rank that has one tells of the same requests; where one is enough, give it to rank 0 alone.
    """

    def __init__(
        self,
        provider: "TracerProvider | None" = None,
        *,
        rank: int = 0,
        parent_of: "Callable[[str], Context | None]" = _no_parent,
    ) -> None:
        """`provider` is by default the program's own, as `set_tracer_provider` has made it.

        `parent_of` returns the context of the engine's own span for a request by its name, in which
        what the cache does for it belongs. Raises `ConfigError` if the SDK is not installed.
        """
        try:
            import opentelemetry.sdk.trace  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
            from opentelemetry import trace  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(MISSING) from error
        self._tracer = trace.get_tracer("lockstep", VERSION, provider)
        self._in = trace.set_span_in_context
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._client = trace.SpanKind.CLIENT
        self._rank = rank
        self._parent_of = parent_of
        self._wall_ns = time.time_ns() - time.monotonic_ns()
        self._lock = threading.Lock()
        self._requests: dict[str, Span] = {}
        self._operations: dict[int, Span] = {}

    def note(self, event: TimedEvent) -> None:
        """Begin or end spans; any thread may call."""
        with self._lock:
            match event:
                case OperationBegan() if belongs(event, self._requests):
                    self._begin_operation(event)
                case OperationMoved(operation, phase, at_s) if operation in self._operations:
                    self._operations[operation].add_event(phase, timestamp=self._ns(at_s))
                case OperationEnded():
                    self._end_operation(event)
                case RequestAdmitted():
                    self._admit(event)
                case RequestReleased():
                    self._release(event)
                case StoreCalled() if event.operation in self._operations:
                    self._call(event)
                case _:
                    pass

    def close(self) -> None:
        """End the spans of what is still going on; `cache.at_close` is the place for it."""
        with self._lock:
            for span in (*self._operations.values(), *self._requests.values()):
                span.end()
            self._operations.clear()
            self._requests.clear()

    def _begin_operation(self, event: OperationBegan) -> None:
        began_ns = self._ns(event.at_s)
        self._operations[event.operation] = self._tracer.start_span(
            f"lockstep.{event.kind}",
            context=self._in(self._request(event.request, began_ns)),
            start_time=began_ns,
            attributes={"lockstep.operation.id": event.operation, "lockstep.rank": self._rank},
        )

    def _end_operation(self, event: OperationEnded) -> None:
        span = self._operations.pop(event.operation, None)
        if span is not None:
            span.set_attribute("lockstep.operation.outcome", event.outcome)
            if event.outcome == "failed":
                span.set_attribute("error.type", event.outcome)
                span.set_status(self._failed)
            span.end(self._ns(event.at_s))

    def _admit(self, event: RequestAdmitted) -> None:
        at_ns = self._ns(event.at_s)
        hit = {
            "device": event.device_tokens,
            "host": event.host_tokens,
            "storage": event.storage_tokens,
        }
        span = self._request(event.request, at_ns)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", sum(hit.values()))
        span.set_attribute("lockstep.asked_tokens", event.tokens)
        for tier, tokens in hit.items():
            span.set_attribute(f"lockstep.hit_tokens.{tier}", tokens)
        span.add_event("admitted", timestamp=at_ns)

    def _release(self, event: RequestReleased) -> None:
        span = self._requests.pop(event.request, None)
        if span is not None:
            span.end(self._ns(event.at_s))

    def _call(self, event: StoreCalled) -> None:
        span = self._tracer.start_span(
            f"{event.call} {event.store}",
            context=self._in(self._operations[event.operation]),
            kind=self._client,
            start_time=self._ns(event.began_s),
            attributes={
                "db.system.name": event.store,
                "db.operation.name": event.call,
                "db.operation.batch.size": sum(event.outcomes.values()),
                "lockstep.pool": event.pool,
                "lockstep.bytes": event.nbytes,
                **{f"lockstep.keys.{name}": keys for name, keys in event.outcomes.items()},
            },
        )
        span.end(self._ns(event.ended_s))

    def _request(self, request: str, began_ns: int) -> "Span":
        """Return the span of a request, which begins now if it has none."""
        span = self._requests.get(request)
        if span is None:
            span = self._requests[request] = self._tracer.start_span(
                "lockstep.request",
                context=self._parent_of(request),
                start_time=began_ns,
                attributes={"lockstep.request.id": request, "lockstep.rank": self._rank},
            )
        return span

    def _ns(self, at_s: float) -> int:
        return self._wall_ns + round(at_s * 1e9)
