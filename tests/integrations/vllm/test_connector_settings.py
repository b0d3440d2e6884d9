"""Valid keys of `kv_connector_extra_config`, and the errors for invalid ones."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.stop_policy import StopPolicy, StopRule
from lockstep.errors import ConfigError
from lockstep.integrations.vllm.connector_settings import ConnectorSettings, HandingOver, parse
from lockstep.ranks.protocol.config import Bounds, Timeouts
from lockstep.ranks.protocol.network_config import Control, Peers
from tests.kit.source_tree import ROOT

GIVEN: dict[str, Any] = {
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


def test_every_key_arrives_where_it_belongs_and_what_a_cache_has_too_in_its_settings() -> None:
    settings = parse(GIVEN)

    assert {key: getattr(settings, key) for key in GIVEN} == GIVEN | {
        "stop_policy": StopPolicy(rule=StopRule.WAIT_COMPLETE, cap_s=3.0),
        "bounds": Bounds(prefetches=4),
        "timeouts": Timeouts(lookup_s=0.5, round_s=600),
    }
    assert settings.host_pages_of(1 << 20) == 2048
    assert parse({"host_pages": 10}).host_pages_of(1 << 30) == 10
    assert settings.for_cache() == {
        name: getattr(settings, name)
        for name in ("stop_policy", "bounds", "timeouts", "store", "pipeline_depth", "transport")
    } | {"control": None}
    assert parse({"host_pages": 1, "control": "/run/s"}).for_cache()["control"] == Control(
        path="/run/s", refused=("weights",)
    )


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"host_pages": None}, "give host_memory_gib"),
        ({"host_memory_gib": 1}, "give host_memory_gib or host_pages, but not both"),
        ({"in_flight": "abort"}, "in_flight is 'abort', must be one of keep, compute"),
        ({"stor": "file:///kv"}, "there is no key 'stor'; known: adapter_versions, bounds,"),
        (
            {"adapter_versions": {"a": 1}},
            "adapter_versions is a dict, must have text in each place",
        ),
        ({"store": "/mnt/kv"}, "store '/mnt/kv' is not a URI; write it as"),
        ({"store": "file:///kv?drect=1"}, "there is no option 'drect'; known: direct"),
        ({"store": "redis://me:word@b"}, "store 'redis://***@b': unknown scheme"),
        ({"timeouts": 3}, "timeouts is 3, must be keys and values"),
        ({"peers": {"adress": "a:1"}}, "peers: there is no key 'adress'; known: address, allow_"),
        ({"peers": {"secret": "short"}}, "peers: the secret of peers has 5 bytes"),
        ({"peers": {"secret": "a", "secret_file": "b"}}, "peers: give secret or secret_file"),
        (
            {"peers": {"secret_file": "/dev/null"}},
            "peers.secret_file is '/dev/null', which is empty",
        ),
        ({"peers": {"secret_file": "/nowhere/at/all"}}, "'/nowhere/at/all', which cannot be read"),
    ],
)
def test_what_is_wrong_is_refused_with_its_key(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: ") as refused:
        parse({"host_pages": 1} | extra)

    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        *(each.name for each in fields(ConnectorSettings)),
        *(f"stop_policy.{each.name}" for each in fields(StopPolicy)),
        *(f"bounds.{each.name}" for each in fields(Bounds)),
        *(f"timeouts.{each.name}" for each in fields(Timeouts)),
    ],
)
def test_every_key_is_explained_on_the_page_on_vllm(key: str) -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")

    rows = [each for each in page.splitlines() if each.startswith("| `")]

    assert any(f"`{key}`" in each.split(" | ")[0] for each in rows)


@pytest.mark.parametrize("store", ["file:///mnt/kv-{rank}", "metrics+memory://"])
def test_a_store_that_may_make_sense_is_taken(store: str) -> None:
    """Parsing accepts a store's URI without opening the store."""
    assert parse({"host_pages": 1, "store": store}).store == store


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
