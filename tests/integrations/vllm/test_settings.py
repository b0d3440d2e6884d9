"""What may stand in `kv_connector_extra_config`, and what is said when it is wrong."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.stop_policy import StopPolicy, StopRule
from lockstep.errors import ConfigError
from lockstep.integrations.settings import PluginSettings, control_of
from lockstep.integrations.sharing import Share
from lockstep.integrations.vllm.handing_over import HandingOver
from lockstep.integrations.vllm.settings import parse
from lockstep.integrations.vllm.weights import InFlight, WeightsChange
from lockstep.ranks.protocol.config import Bounds, Timeouts
from lockstep.ranks.protocol.outside import Control, Peers
from tests.kit.source_tree import ROOT


def test_every_key_arrives_where_it_belongs() -> None:
    settings = parse(
        {
            "host_memory_gib": 2,
            "store": "file:///kv",
            "model": "a name",
            "weights_version": "7",
            "adapter_versions": {"an adapter": "3"},
            "weight_digests": "/cache/digests",
            "share": "engine",
            "pipeline_depth": 0,
            "idle_wait_s": 0.01,
            "stop_policy": {"rule": "wait_complete", "cap_s": 3},
            "bounds": {"prefetches": 4},
            "timeouts": {"lookup_s": 0.5},
            "weights_change": "with_name",
            "in_flight": "compute",
        }
    )

    assert settings.host_pages_of(1 << 20) == 2048
    assert (settings.store, settings.model, settings.weights_version) == (
        "file:///kv",
        "a name",
        "7",
    )
    assert settings.adapter_versions == {"an adapter": "3"}
    assert settings.weight_digests == "/cache/digests"
    assert (settings.share, parse({"host_pages": 1}).share) == (Share.ENGINE, Share.ALL)
    assert (settings.pipeline_depth, settings.idle_wait_s) == (0, 0.01)
    assert settings.stop_policy == StopPolicy(rule=StopRule.WAIT_COMPLETE, cap_s=3.0)
    assert settings.bounds == Bounds(prefetches=4)
    assert settings.timeouts == Timeouts(lookup_s=0.5, round_s=600)
    assert settings.weights_change is WeightsChange.WITH_NAME
    assert settings.in_flight is InFlight.COMPUTE


def test_host_memory_may_be_given_as_a_number_of_pages() -> None:
    assert parse({"host_pages": 10}).host_pages_of(1 << 30) == 10


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "give host_memory_gib"),
        ({"host_pages": 1, "host_memory_gib": 1}, "not both"),
        ({"host_pages": 0}, "host_pages is 0"),
        ({"host_pages": 1, "in_flight": "abort"}, "in_flight is 'abort'; known: keep, compute"),
        (
            {"host_pages": 1, "weights_change": 1},
            "weights_change is 1; known: with_reset, with_name",
        ),
        ({"host_pages": True}, "host_pages must be an integer, not True"),
        ({"host_memory_gib": -1}, "host_memory_gib is -1"),
        ({"host_memory_gib": float("nan")}, "host_memory_gib is nan"),
        (
            {"host_pages": 1, "stor": "file:///kv"},
            "no key 'stor'; known: adapter_versions, bounds,",
        ),
        ({"host_pages": 1, "adapter_versions": {"a": 1}}, "adapter_versions.a must be text, not 1"),
        ({"host_pages": 1, "store": ""}, "store must be text, not ''"),
        ({"host_pages": 1, "store": "/mnt/kv"}, "store '/mnt/kv' is not a URI; write it as"),
        ({"host_pages": 1, "store": "file:///kv?drect=1"}, "unknown option 'drect'; file:// knows"),
        ({"host_pages": 1, "store": "redis://me:word@b"}, "store 'redis://***@b': unknown scheme"),
        ({"host_pages": 1, "transport": "carrier"}, "transport is 'carrier'; known: auto, "),
        ({"host_pages": 1, "pipeline_depth": 2}, "pipeline_depth is 2, must be 0 or 1"),
        ({"host_pages": 1, "metrics_port": 0}, "metrics_port is 0, must be 1 to 65535"),
        ({"host_pages": 1, "share": "vllm"}, "share is 'vllm'; known: all, engine"),
        ({"host_pages": 1, "idle_wait_s": 5}, "idle_wait_s is 5"),
        ({"host_pages": 1, "bounds": {"prefetch": 3}}, "bounds: there is no key 'prefetch'"),
        ({"host_pages": 1, "bounds": {"prefetches": 0}}, "bounds: prefetches is 0"),
        ({"host_pages": 1, "bounds": {"prefetches": 1.5}}, "bounds.prefetches must be an integer"),
        ({"host_pages": 1, "timeouts": {"copy_s": 0}}, "timeouts: copy_s is 0"),
        (
            {"host_pages": 1, "stop_policy": {"rule": "never"}},
            "rule is 'never'; known: best_effort",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_key(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config") as refused:
        parse(extra)

    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", [each.name for each in fields(PluginSettings)])
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_key(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"host_pages": 1, key: ["not", "this"]})

    assert str(refused.value).startswith(f"kv_connector_extra_config: {key} ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        *(each.name for each in fields(PluginSettings)),
        *(f"stop_policy.{each.name}" for each in fields(StopPolicy)),
        *(f"bounds.{each.name}" for each in fields(Bounds)),
        *(f"timeouts.{each.name}" for each in fields(Timeouts)),
    ],
)
def test_every_key_is_explained_on_the_page_on_vllm(key: str) -> None:
    said = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")

    rows = [each for each in said.splitlines() if each.startswith("| `")]

    assert any(f"`{key}`" in each.split(" | ")[0] for each in rows)


@pytest.mark.parametrize("store", ["file:///mnt/kv-{rank}", "metrics+memory://"])
def test_a_store_that_may_make_sense_is_taken(store: str) -> None:
    """Nothing is opened yet."""
    assert parse({"host_pages": 1, "store": store}).store == store


def test_an_operator_asks_an_engine_s_group_for_all_but_other_weights() -> None:
    assert control_of(parse({"host_pages": 1})) is None
    assert control_of(parse({"host_pages": 1, "control": "/run/s"})) == Control(
        path="/run/s", refused=("weights",)
    )


def test_memory_for_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="one page of this model takes 1073741824 bytes"):
        parse({"host_memory_gib": 0.5}).host_pages_of(1 << 30)


def test_engines_that_work_for_each_other_are_told_where_and_for_how_long(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sixteen characters or more\n")
    peers = {
        "address": "10.0.0.4:0",
        "secret_file": str(tmp_path / "secret"),
        "allow_sources": ["10.0.0.0/8"],
    }
    settings = parse({"host_pages": 1, "peers": peers, "handing_over": {"patience_s": 2}})

    assert settings.peers == Peers(
        address="10.0.0.4:0",
        secret="sixteen characters or more",  # noqa: S106 - of this test alone.
        allow_sources=("10.0.0.0/8",),
    )
    assert settings.handing_over == HandingOver(patience_s=2)
    assert parse({"host_pages": 1}).peers is None


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"peers": {"adress": "a:1"}}, "peers: there is no key 'adress'; known: address, allow_"),
        ({"peers": {"allow_sources": "10.0.0.0/8"}}, "peers.allow_sources must be a list of texts"),
        ({"peers": {"allow_sources": ["10.0.0.1/8"]}}, "peers: '10.0.0.1/8' is no network"),
        ({"peers": {"address": 7}}, "peers.address must be text"),
        ({"peers": {"insists": "yes"}}, "peers.insists must be true or false"),
        ({"peers": {"secret": "short"}}, "peers: "),
        (
            {"peers": {"secret": "a", "secret_file": "b"}},
            "give secret or secret_file, and not both",
        ),
        ({"peers": {"secret_file": "/nowhere/at/all"}}, "'/nowhere/at/all' cannot be read"),
        ({"peers": "10.0.0.4:0"}, "peers must hold keys and values"),
        ({"handing_over": {"ttl_s": 0}}, "handing_over: ttl_s is 0, must be"),
        ({"handing_over": {"ttl_s": "1"}}, "handing_over.ttl_s must be a number"),
    ],
)
def test_what_is_wrong_between_engines_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse({"host_pages": 1, **extra})
