"""Exports OpenTelemetry spans of a cache's work for requests.

A request's span begins with the cache's first work for the request and ends when the engine releases
the request. The request's operations, such as prefetch and load back, are child spans, with copies and
store calls below them. Steps, rounds and backups belong to no request, so only a timeline
(`chrome_trace`) shows them.

Spans are sent to the program's `TracerProvider`, with its exporters and its sampling.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError
from ..ranks.protocol.timed_events import RoundHeld, StepHalf, TimedEvent
from ..version import VERSION
from .tracer import REQUEST, REQUEST_ID, Span, Tracer

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context

MISSING: Final = "spans need the package opentelemetry-sdk: pip install 'lockstep-kv[otel]'"


def _no_parent(request: str) -> "Context | None":
    del request
    return None


class Spans:
    """Exports the spans of one rank's requests. Pass the method `note` to `Cache.open` as `timeline`.

    Every rank with a `Spans` exports the same requests. To export each request once, create a `Spans`
    on rank 0 only.
    """

    def __init__(
        self,
        provider: "otel.TracerProvider | None" = None,
        *,
        rank: int = 0,
        parent_of: "Callable[[str], Context | None]" = _no_parent,
    ) -> None:
        """Start exporting to `provider`; the default is the one set by `set_tracer_provider`.

        `parent_of` maps a request's name to the context of the engine's span for that request, which
        becomes the parent of Lockstep's span. Raises `ConfigError` if the SDK is not installed.
        """
        try:
            import opentelemetry.sdk.trace  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
            from opentelemetry import trace  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(MISSING) from error
        self._otel = trace.get_tracer("lockstep", VERSION, provider)
        self._in = trace.set_span_in_context
        self._failed = trace.Status(trace.StatusCode.ERROR)
        self._kinds = trace.SpanKind
        self._rank = rank
        self._parent_of = parent_of
        self._wall_ns = time.time_ns() - time.monotonic_ns()
        self._lock = threading.Lock()
        self._tracer = Tracer(rank)
        self._open: dict[Span, otel.Span] = {}

    def note(self, event: TimedEvent) -> None:
        """Begin or end the spans that an event starts or finishes. Thread-safe."""
        if not isinstance(event, StepHalf | RoundHeld):
            with self._lock:
                for span in self._tracer.spans(event):
                    self._export(span)

    def close(self) -> None:
        """End all open spans; register this method with `cache.at_close`."""
        with self._lock:
            for span, made in reversed(self._open.items()):
                self._end(span, made)
            self._open.clear()
            self._tracer = Tracer(self._rank)

    def _export(self, span: Span) -> None:
        made = self._open.pop(span, None) or self._begun(span)
        if made is not None and span.ended_s is None:
            self._open[span] = made
        elif made is not None:
            self._end(span, made)

    def _begun(self, span: Span) -> "otel.Span | None":
        """Return a new OpenTelemetry span; None if the work belongs to no request."""
        outer = None if span.parent is None else self._open.get(span.parent)
        if outer is None and span.track != REQUEST:
            return None
        in_request = self._in(outer) if outer else self._parent_of(span.attributes[REQUEST_ID])
        calls = "db.system.name" in span.attributes
        return self._otel.start_span(
            span.name,
            context=in_request,
            kind=self._kinds.CLIENT if calls else self._kinds.INTERNAL,
            start_time=self._ns(span.began_s),
            attributes=span.attributes,
        )

    def _end(self, span: Span, made: "otel.Span") -> None:
        made.set_attributes(span.attributes)
        for name, at_s, attributes in span.marks:
            made.add_event(name, attributes, self._ns(at_s))
        if "error.type" in span.attributes:
            made.set_status(self._failed)
        made.end(None if span.ended_s is None else self._ns(span.ended_s))

    def _ns(self, at_s: float) -> int:
        return self._wall_ns + round(at_s * 1e9)
