"""The statistics passed to vLLM add up exactly to the cache's token counts."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.integrations.vllm.lent_blocks import LentBlocks
from lockstep.integrations.vllm.plugin_telemetry import ELSEWHERE, PluginTelemetry, source_of
from lockstep.integrations.vllm.stats import (
    ALL,
    RESTORED,
    Restored,
    StatsFeed,
    StatsReport,
    add,
    line,
    spread,
)
from lockstep.launch.top.group_sample import GroupSample, numbers_in
from lockstep.launch.top.window import Window
from lockstep.ranks.executor.base import BytesMoved, ExecutorCounts, LateCalls
from lockstep.ranks.group.member.cache_stats import CacheStats
from lockstep.ranks.group.one_scheduler.scheduler_cache import SchedulerCache, decide
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.orders import Direction
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.storage_backends.latencies import Latencies
from lockstep.telemetry.families import EXECUTOR_FAMILIES, FAMILIES, Type, ranked_samples
from tests.kit.ranks.in_turn import HostRanksInTurn
from tests.kit.source_tree import ROOT
from tests.kit.telemetry.file_watch import metrics_asked_for
from tests.kit.telemetry.watched_group import exposed_by
from tests.kit.vllm.scripted import PAGE_TOKENS, scripted
from tests.kit.vllm.sides import side_of

PROMPT = list(range(4 * PAGE_TOKENS + 1))
LONGER = [*PROMPT, *range(100, 100 + 2 * PAGE_TOKENS)]


def counters(stats: CacheStats) -> StatsReport:
    return {
        family.name: {",".join(("0", *labels)): value for labels, value in family.samples(stats)}
        for family in FAMILIES
        if family.type is Type.COUNTER
    }


def of_counters(report: StatsReport) -> StatsReport:
    return {name: each for name, each in report.items() if ALL[name].type is Type.COUNTER}


def without(report: StatsReport, name: str) -> StatsReport:
    return {each: values for each, values in report.items() if values and each != name}


def test_all_that_is_told_adds_up_to_what_the_cache_has_counted(tmp_path: Path) -> None:
    total: StatsReport = {}
    with scripted(f"file://{tmp_path}") as engine:
        for tokens in (PROMPT, LONGER, PROMPT, list(range(500, 520)), LONGER):
            engine.serve(tokens)
            total = add(total, engine.watching.report() or {})
        stats = engine.cache.stats()

    assert stats.replica.hit_tokens["host"] == 4 * PAGE_TOKENS * 2 + 6 * PAGE_TOKENS
    restored = of_counters(total).pop("restored_tokens")
    assert restored == {"0,saved": stats.replica.hit_tokens["host"], "0,failed": 0, "0,dropped": 0}
    assert without(of_counters(total), "restored_tokens") == without(counters(stats), "")


def test_hits_are_split_by_where_they_came_from_as_the_cache_splits_them(tmp_path: Path) -> None:
    with scripted(f"file://{tmp_path}") as engine:
        engine.serve(PROMPT)
    with scripted(f"file://{tmp_path}") as restarted:
        restarted.serve(PROMPT)
        restarted.serve(LONGER)
        counted = restarted.cache.stats().replica.hit_tokens

    assert restarted.sources == [{"disk": 4 * PAGE_TOKENS}, {"host": 4 * PAGE_TOKENS}]
    assert (counted["storage"], counted["host"]) == (4 * PAGE_TOKENS, 4 * PAGE_TOKENS)


@pytest.mark.parametrize(
    ("store", "source"),
    [
        (None, ELSEWHERE),
        ("file:///kv", "disk"),
        ("metrics+3fs:///kv?index=sqlite:///i", "disk"),
        ("peer://host:1", "p2p"),
        ("memory://", ELSEWHERE),
    ],
)
def test_a_store_is_called_what_the_engine_has_a_name_for(store: str | None, source: str) -> None:
    assert source_of(store) == source


def test_a_busy_engine_is_told_now_and_then_and_one_that_falls_idle_at_once() -> None:
    now = 100.0
    feed = StatsFeed(clock=lambda: now)

    assert feed.due(idle=False)
    assert not feed.due(idle=False)
    assert feed.due(idle=True)
    now += 1.0
    assert feed.due(idle=False)


def test_a_gauge_is_told_when_it_changes_and_is_nothing_once_it_is_gone() -> None:
    with scripted() as engine:
        feed = StatsFeed()
        engine.cache.prefetch("waits", PROMPT)
        engine.cache.back_up("r", PROMPT[:-1], range(4))
        first = feed.report(ranked_samples(engine.cache.stats()))
        again = feed.report(ranked_samples(engine.cache.stats()))
        engine.cache.flush()
        later = feed.report(ranked_samples(engine.cache.stats()))

    assert first["operations_in_flight"] == {"0,backup": 1}
    assert again == {}
    assert later["operations_in_flight"] == {"0,backup": 0}


def deciding(ranks: int) -> SchedulerCache:
    config = HostRanksInTurn(ranks=ranks).caches[0].config
    replica = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"model")
    return decide(Opened(rank, ranks, config, replica, "") for rank in range(ranks))


def test_what_workers_have_counted_is_the_same_for_vllm_at_the_port_and_for_an_operator() -> None:
    """The workers' counts agree between vLLM's metrics, Lockstep's port and `lockstep ctl`."""
    took = Latencies()
    took.add(0.5)
    counts = {
        rank: ExecutorCounts(
            bytes_moved=BytesMoved(l1_to_l2=100_000 + rank),
            pages_corrupt=rank,
            storage_late=LateCalls(2),
            copies={Direction.TO_HOST: took.histogram()},
        )
        for rank in range(2)
    }
    cache = deciding(2)
    cache.deliver(None, {0: counts[1]})
    cache.deliver(None, counts)

    report = PluginTelemetry(side_of(cache, LentBlocks([])), None).report() or {}
    window = Window(GroupSample(0.0, {0: numbers_in(exposed_by(cache))}))
    stats = cache.stats()

    assert report["corrupt_pages"] == {"0": 0, "1": 1}
    assert report["storage_late_calls"] == {"0": 2, "1": 2}
    moved = report["moved_bytes"]
    assert (moved["0,device,host"], moved["1,device,host"]) == (100_000, 100_001)
    assert line(report)["MB device to host"] == pytest.approx(0.2)
    seen = {
        name: [window.is_at(name, rank=rank) for rank in ("0", "1")]
        for name in ("moved_bytes_total", "corrupt_pages_total", "copy_seconds_count")
    }
    assert seen == {
        "moved_bytes_total": [100_000, 100_001],
        "corrupt_pages_total": [0, 1],
        "copy_seconds_count": [1, 1],
    }
    assert (stats.bytes_moved.l1_to_l2, stats.pages_corrupt) == (200_001, 1)
    assert sum(stats.copies[Direction.TO_HOST].counts) == stats.storage_late.calls // 2 == 2
    json.dumps(asdict(stats))


def test_the_scheduler_s_port_has_each_metric_that_the_dashboard_and_the_alerts_ask_for() -> None:
    exported = {
        line.split()[2] for line in exposed_by(deciding(2)).splitlines() if "# TYPE" in line
    }

    assert metrics_asked_for() - exported == set()


def test_a_scheduler_that_has_heard_of_no_worker_tells_no_zeros_in_their_place() -> None:
    cache = deciding(1)

    report = PluginTelemetry(side_of(cache, LentBlocks([])), None).report() or {}

    assert report["asked_tokens"] == {"0": 0}
    assert report["restored_tokens"]["0,saved"] == 0
    assert {*report} & {each.name for each in EXECUTOR_FAMILIES} == set()


def test_tellings_of_two_times_add_up_and_the_later_gauge_counts() -> None:
    buckets = [1.0, *(0 for _ in range(22))]
    one: StatsReport = {"rounds": {"0": 3}, "namespaces": {"0": 5}, "step_seconds": {"0": buckets}}
    other: StatsReport = {
        "rounds": {"0": 4},
        "namespaces": {"0": 2},
        "step_seconds": {"0": buckets},
    }

    total = add(one, other)

    assert (total["rounds"], total["namespaces"]) == ({"0": 7}, {"0": 2})
    assert total["step_seconds"]["0"][0] == pytest.approx(2.0)
    assert one["rounds"] == {"0": 3}


def test_loads_are_counted_by_what_became_of_them() -> None:
    counted = Restored()
    counted.begun("a", 10)
    counted.begun("b", 20)
    counted.begun("c", 40)

    counted.ended("dropped", ["c"])
    counted.ended("failed", ["b"])
    counted.ended("saved", ["a", "b", "c"])
    counted.ended("dropped", ["a"])

    assert counted.tokens == {"saved": 10, "failed": 20, "dropped": 40}


@pytest.mark.parametrize("seed", range(20))
def test_a_histogram_that_is_told_by_its_counts_is_rebuilt_with_its_counts_and_its_sum(
    seed: int,
) -> None:
    generator = random.Random(seed)
    true, rebuilt = Latencies(), Latencies()
    for _ in range(generator.randint(1, 60)):
        true.add(generator.choice([generator.random() ** 6 * 100, 0.0, 1e-5, 5e-3, 80.0]))
    histogram = true.histogram()

    for value, times in spread([histogram.sum_s, *histogram.counts]):
        for _ in range(times):
            rebuilt.add(value)

    assert rebuilt.histogram().counts == histogram.counts
    assert rebuilt.histogram().sum_s == pytest.approx(histogram.sum_s, rel=1e-6, abs=1e-8)


def test_the_log_s_line_names_what_has_gone_wrong_and_leaves_out_what_has_not() -> None:
    report: dict[str, Any] = {
        "asked_tokens": {"0": 100},
        "hit_tokens": {"0,host": 60, "0,storage": 20},
        "restored_tokens": {"0,saved": 64, "0,failed": 16},
        "operations": {"0,load_back,failed": 1, "0,load_back,complete": 4, "0,backup,failed": 7},
        "moved_bytes": {"0,host,device": 2_500_000, "1,host,device": 2_500_000},
        "step_seconds": {"0": [0.0005, 10, *(0 for _ in range(21))]},
    }

    assert line(report) == {
        "requested tokens": 100,
        "hit on device": 0,
        "hit in host memory": 60,
        "hit in storage": 20,
        "restored tokens": 64,
        "failed tokens": 16,
        "failed loads": 1,
        "MB host to device": 5.0,
        "us a step": 50.0,
    }


def test_the_page_on_vllm_explains_what_is_told_beside_the_cache_s_own_metrics() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")

    assert RESTORED.full_name in page
