"""vLLM's KV events and metrics under Lockstep match the cache's counts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.ranks.protocol.events import MissReason
from tests.kit.telemetry.file_watch import metrics_asked_for
from tests.kit.vllm.processes import last_line_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LABELS = "[('model_name', 'm'), "


@dataclass
class Seen:
    """Events and metrics of an engine that served three prompts cold, then from host memory."""

    events: list[dict[str, Any]]
    metrics: dict[str, float]
    at_the_start: dict[str, float]
    """Values of Lockstep's metrics before the first request, by sample name."""
    names: list[str]
    stats: dict[str, Any]

    def stored(self, medium: str) -> list[tuple[int, int | None, list[int], Any]]:
        """Return each block stored to a medium: its hash, its parent's hash, tokens, and extra keys."""
        blocks: list[tuple[int, int | None, list[int], Any]] = []
        for each in self.events:
            if each["type"] == "BlockStored" and each["medium"] == medium:
                size, before = each["block_size"], each["parent_block_hash"]
                for at, (name, extra) in enumerate(
                    zip(each["block_hashes"], each["extra_keys"], strict=True)
                ):
                    tokens = each["token_ids"][at * size : (at + 1) * size]
                    blocks.append((name, before, tokens, extra))
                    before = name
        return blocks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Seen:
    folder = tmp_path_factory.mktemp("watched")
    return Seen(**json.loads(last_line_of("tests.kit.vllm.watched", folder, model, folder)))


def test_blocks_in_host_memory_and_in_the_store_are_named_as_vllm_names_them(seen: Seen) -> None:
    """Blocks in host memory and in the store have the hashes and tokens of vLLM's own events."""
    named = {each[0]: each for each in seen.stored("GPU")}

    on_host, in_store = seen.stored("CPU"), seen.stored("STORAGE")

    assert [named.get(each[0]) for each in on_host] == on_host
    assert sorted(each[0] for each in in_store) == sorted(each[0] for each in on_host)
    assert len({each[0] for each in on_host}) == seen.stats["pools"]["kv"]["host"]["cached"]
    assert ["tenant"] in [each[3] for each in on_host]


def test_vllm_s_metrics_have_what_the_cache_has_counted_to_the_token(seen: Seen) -> None:
    hits = {
        tier: seen.metrics[f"lockstep_hit_tokens_total {LABELS}('rank', '0'), ('tier', '{tier}')]"]
        for tier in ("device", "host", "storage")
    }
    restored = f"lockstep_restored_tokens_total {LABELS}('outcome', 'saved'), ('rank', '0')]"

    counted = seen.stats["replica"]["hit_tokens"]
    assert counted["host"] > 0
    own = f"vllm:prompt_tokens_cached_total {LABELS[:-2]}]"
    assert sum(hits.values()) == seen.metrics[own]
    assert hits == counted
    assert seen.metrics[restored] == counted["host"] + counted["storage"]
    requested = seen.metrics[f"lockstep_asked_tokens_total {LABELS}('rank', '0')]"]
    assert requested == seen.stats["replica"]["asked_tokens"]
    steps = seen.metrics[f"lockstep_step_seconds_count {LABELS}('rank', '0')]"]
    assert steps == seen.stats["steps"]


def test_what_alerts_count_stands_at_0_before_the_first_request(seen: Seen) -> None:
    """Alert counters are exported as 0 before the first request: Prometheus ignores a first sample."""
    reason = f"lockstep_missed_pages_total {LABELS}('rank', '0'), ('reason', '{{}}')]"
    corrupt = f"lockstep_corrupt_pages_total {LABELS}('rank', '0')]"

    at_the_start = {
        seen.at_the_start.get(each) for each in (corrupt, *map(reason.format, MissReason))
    }
    assert at_the_start == {0}


def test_vllm_exports_each_metric_that_the_dashboard_and_the_alerts_ask_for(seen: Seen) -> None:
    assert metrics_asked_for() - set(seen.names) == set()
