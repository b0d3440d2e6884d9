"""Scrape a group while it serves: the text parses, and its numbers equal those of the engine."""

import socket
import threading
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.top.group_sample import GroupSample, label_of, look, numbers_in
from lockstep.launch.top.window import Window
from lockstep.ranks.protocol.events import MissReason
from lockstep.small_engine.counts import ReplayCounts
from lockstep.telemetry.families import FAMILIES
from lockstep.telemetry.port import serve_metrics, watch
from tests.kit.servers.ports import free_ports
from tests.kit.telemetry.watched_group import SETTINGS, exposed_by, watched_group

STORED = replace(SETTINGS, store="memory://scraped", host_pages=400, device_pages=200)
"""Settings with so little host memory that many pages must be read from storage."""

Served = tuple[GroupSample, list[ReplayCounts], list[float]]
"""The last scrape, the counts of all ranks' engines, and the hit totals scraped earlier in the run."""


@pytest.fixture(scope="module")
def served() -> Served:
    with watched_group(STORED) as watched:
        cache = watched.group.caches[0]
        port = serve_metrics(cache.stats, 0)
        done = threading.Event()
        meanwhile: list[float] = []

        def scrape() -> None:
            while not done.is_set():
                seen = look([f"127.0.0.1:{port.port}"], 0.0)
                meanwhile.append(Window(seen).grew("hit_tokens_total"))

        scraper = threading.Thread(target=scrape)
        scraper.start()
        counts = [watched.serve(seed=seed) for seed in (1, 2, 1)]
        done.set()
        scraper.join()
        seen = watched.seen()
        port.close()
    return seen, counts, meanwhile


def test_each_reason_for_missed_pages_stands_at_0_before_the_first() -> None:
    """Counters are 0 before a miss, because Prometheus counts increases only after a first sample."""
    with watched_group(SETTINGS) as watched:
        seen = watched.seen()

    missed = {
        label_of(key, "reason"): number
        for key, number in seen.any_rank.items()
        if key[0] == "lockstep_missed_pages_total"
    }
    assert missed == dict.fromkeys(MissReason, 0)


def test_hits_by_tier_equal_what_the_engine_has_counted_to_the_token(served: Served) -> None:
    seen, counts, _ = served
    window = Window(seen)

    by_tier = [window.grew("hit_tokens_total", tier=tier) for tier in ("device", "host", "storage")]

    assert [each.preempted + each.retractions for each in counts] == [0, 0, 0]
    assert by_tier == [
        sum(each.hit_device_tokens for each in counts),
        sum(each.hit_host_tokens for each in counts),
        sum(each.hit_storage_tokens for each in counts),
    ]
    assert all(by_tier)


def test_scrapes_while_the_group_serves_see_hits_grow(served: Served) -> None:
    _, _, meanwhile = served

    assert meanwhile == sorted(meanwhile)
    assert len(set(meanwhile)) > 2


def test_the_pages_of_a_pool_are_free_evictable_held_or_somebody_s_own(served: Served) -> None:
    window = Window(served[0])

    assert window.is_at("pool_pages", pool="kv", tier="host") == STORED.host_pages
    assert window.is_at("pool_pages", pool="kv", tier="device") == STORED.device_pages
    assert window.is_at("pool_pages", tier="device", state="own") == 0
    assert window.is_at("pool_pages", state="held") == 0


def test_the_store_s_calls_are_counted_under_its_kind(served: Served) -> None:
    window = Window(served[0])

    read = window.grew_on_every_rank("storage_bytes_total", store="memory", call="read")

    assert read == window.grew_on_every_rank("moved_bytes_total", source="storage") > 0
    assert window.percentile("storage_call_seconds", 0.5, store="memory", call="read")


def test_every_family_is_exposed_with_its_type_and_meaning_and_the_rank() -> None:
    with watched_group(SETTINGS) as watched:
        text = exposed_by(watched.group.caches[1])

    ranks = {dict(labels).get("rank") for _, labels in numbers_in(text)}
    type_lines = {f"# TYPE {each.full_name} {each.type}" for each in FAMILIES}
    assert {line for line in type_lines if line not in text} == set()
    assert ranks == {"1"}


def test_a_port_that_is_taken_is_refused_with_a_remedy() -> None:
    with watched_group(SETTINGS) as watched:
        stats = watched.group.caches[0].stats
        port = serve_metrics(stats, 0)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port.port}: .*choose another port"):
            serve_metrics(stats, port.port)
        port.close()


def test_a_port_that_some_rank_cannot_have_is_refused_on_every_rank() -> None:
    with watched_group(SETTINGS) as watched:
        for cache in watched.group.caches:
            with pytest.raises(ConfigError, match="metrics_port is 65535, must be 65534 or less"):
                watch(cache, 65535)
        with pytest.raises(ConfigError, match=r"65536: .*; choose another port"):
            serve_metrics(watched.group.caches[0].stats, 1 << 16)


def test_who_connects_and_does_not_say_what_it_wants_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.telemetry.port._Handler.timeout", 0.05)
    with watched_group(SETTINGS) as watched:
        port = serve_metrics(watched.group.caches[0].stats, 0)
        with socket.create_connection(("127.0.0.1", port.port), timeout=30.0) as slow:
            slow.sendall(b"GET /met")
            received = slow.recv(1)
        port.close()

    assert received == b""


def test_the_port_of_a_cache_is_its_rank_s_and_ends_with_it() -> None:
    with watched_group(SETTINGS) as watched:
        first = free_ports(2)
        for cache in watched.group.caches:
            watch(cache, first)
        ports = [f"127.0.0.1:{first + rank}" for rank in range(2)]
        open_ranks = sorted(look(ports, 0.0).ranks)

    assert open_ranks == [0, 1]
    assert list(look(ports, 0.0).silent) == ports
