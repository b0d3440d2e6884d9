"""Spans of a cache's work for requests, as OpenTelemetry's exporter receives them."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lockstep import Cache
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import ConfigError
from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.ranks.protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    RequestReleased,
    StoreCalled,
)
from lockstep.telemetry.spans import Spans
from tests.kit.launch.replays_in_process import scheduler

SETTINGS = ReplaySettings(
    ranks=1, requests=12, device_pages=120, host_pages=110, store="memory://spans"
)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


def replayed(spans: Spans) -> None:
    """Serve a workload twice; in the second run, pages are read from the store."""
    for _ in range(2):
        collective = InProcessGroup(1).member(0)
        settings = replace(SETTINGS, stop_policy="wait_complete")
        cache = Cache.open(settings.cache_config(), collective, timeline=spans.note)
        cache.at_close(spans.close)
        assert scheduler(settings, cache).run()
        cache.close()


def by_name(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [each for each in exporter.get_finished_spans() if each.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def began(span: ReadableSpan) -> int:
    return span.start_time or 0


def test_a_request_has_a_span_with_its_operations_and_their_calls_in_it(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    replayed(Spans(provider))

    spans = {each.context.span_id: each for each in exporter.get_finished_spans() if each.context}
    children = {each: spans[each.parent.span_id] for each in spans.values() if each.parent}
    requests = by_name(exporter, "lockstep.request")
    assert len(requests) == 2 * 12
    assert set(requests) == set(spans.values()) - set(children)
    assert {(inner.name, outer.name) for inner, outer in children.items()} >= {
        ("lockstep.prefetch", "lockstep.request"),
        ("lockstep.load_back", "lockstep.request"),
        ("exists memory", "lockstep.prefetch"),
        ("read memory", "lockstep.prefetch"),
        ("copy to device", "lockstep.load_back"),
    }
    assert [each for each, outer in children.items() if began(each) < began(outer)] == []


def test_attributes_say_what_was_hit_and_what_became_of_keys(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    replayed(Spans(provider, rank=3))

    requests = [attributes(each) for each in by_name(exporter, "lockstep.request")]
    hits = [each["gen_ai.usage.cache_read.input_tokens"] for each in requests]
    reads = [attributes(each) for each in by_name(exporter, "read memory")]
    assert {each["lockstep.rank"] for each in requests} == {3}
    assert hits == [
        each["lockstep.hit_tokens.device"]
        + each["lockstep.hit_tokens.host"]
        + each["lockstep.hit_tokens.storage"]
        for each in requests
    ]
    assert any(hits)
    assert {(e["db.system.name"], e["db.operation.name"]) for e in reads} == {("memory", "read")}
    assert sum(each["lockstep.bytes"] for each in reads) > 0


def test_a_request_s_span_is_in_the_engine_s_own(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    engine = provider.get_tracer("engine").start_span("llm_request")
    spans = Spans(provider, parent_of=lambda _: trace.set_span_in_context(engine))

    spans.note(OperationBegan(1, "prefetch", "r", "query", 1.0))
    spans.note(OperationEnded(1, "prefetch", "miss", 2.0))
    spans.note(RequestReleased("r", 3.0))

    (request,) = by_name(exporter, "lockstep.request")
    assert request.parent == engine.get_span_context()
    assert (request.end_time or 0) - began(request) == 2_000_000_000


def test_an_operation_that_failed_is_an_error_and_one_that_goes_on_ends_with_the_cache(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = Spans(provider)
    spans.note(OperationBegan(1, "load_back", "r", "issued", 1.0))
    spans.note(OperationBegan(2, "prefetch", "s", "query", 1.0))
    spans.note(OperationMoved(2, "transfer", 1.5))
    spans.note(OperationEnded(1, "load_back", "failed", 2.0))
    spans.note(RequestReleased("r", 2.5))
    spans.close()

    (load,) = by_name(exporter, "lockstep.load_back")
    (prefetch,) = by_name(exporter, "lockstep.prefetch")
    assert load.status.status_code is trace.StatusCode.ERROR
    assert attributes(load)["error.type"] == "failed"
    assert [each.name for each in prefetch.events] == ["query", "transfer"]
    assert len(exporter.get_finished_spans()) == 4


def test_what_belongs_to_no_request_has_no_span(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = Spans(provider)

    spans.note(OperationBegan(1, "backup", "", "issued", 1.0))
    spans.note(StoreCalled("file", "write", 1, "kv", {"ok": 1}, 10, 1.0, 1.1))
    spans.note(OperationEnded(1, "backup", "complete", 2.0))
    spans.note(OperationBegan(2, "persist", "r", "issued", 2.0))
    spans.close()

    assert exporter.get_finished_spans() == ()


def test_where_the_sdk_is_missing_it_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigError, match=r"opentelemetry-sdk: pip install 'lockstep-kv\[otel\]'"):
        Spans()
