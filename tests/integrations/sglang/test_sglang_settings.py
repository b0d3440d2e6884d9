"""Valid SGLang flags and extra configuration, and the errors for invalid ones."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.stop_policy import StopPolicy, StopRule
from lockstep.coordinator.transport import Transport
from lockstep.errors import ConfigError
from lockstep.integrations.sglang.engine.sglang_settings import (
    WHERE,
    DevicePoolSize,
    SglangSettings,
    parse,
    store_to_attach,
)
from lockstep.ranks.protocol.config import Timeouts, WritePolicy
from lockstep.ranks.protocol.orders import KV_POOL

MAIN = {KV_POOL: DevicePoolSize(device_pages=100, page_bytes=1 << 20)}
TWO = MAIN | {"window": DevicePoolSize(device_pages=50, page_bytes=1 << 20)}


@dataclass
class Given:
    """SGLang's resolved flags if the user sets none."""

    hicache_ratio: float | None = 2.0
    hicache_size: int = 0
    hicache_write_policy: str = "write_through"
    hicache_host_memory_mode: str = "cache"
    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    hicache_storage_prefetch_policy: str = "best_effort"


def parsed(extra: dict[str, Any] | None = None, **flags: Any) -> SglangSettings:
    text = None if extra is None else json.dumps(extra)
    return parse(Given(hicache_storage_backend_extra_config=text, **flags))


def test_every_key_that_is_not_of_all_plug_ins_arrives_where_it_belongs() -> None:
    """Each setting that only SGLang's plug-in has is passed to the part that uses it."""
    settings = parsed(
        {
            "host_pages": 7,
            "transport": "torch",
            "compare_batches": True,
            "prefetch_threshold": 256,
            "prefetch_timeout_base": 2,
            "prefetch_timeout_per_ki_token": 0.5,
            "backend_name": "lockstep",
            "module_path": "a.module",
            "class_name": "AClass",
            "interface_v1": 1,
        },
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="timeout",
        hicache_write_policy="write_through_selective",
    )

    plugin = settings.plugin
    assert (plugin.host_pages, plugin.transport) == (7, Transport.TORCH)
    assert plugin.timeouts == Timeouts(round_s=600)
    assert plugin.stop_policy == StopPolicy(rule=StopRule.TIMEOUT, base_s=2.0, per_ki_token_s=0.5)
    assert settings.flags.hicache_write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    assert (plugin.prefetch_threshold, plugin.compare_batches) == (256, True)


def test_the_group_of_the_stop_policy_stands_in_the_place_of_the_flag() -> None:
    given = {"stop_policy": {"rule": "wait_complete", "cap_s": 3}}

    policy = parsed(given, hicache_storage_prefetch_policy="timeout").plugin.stop_policy

    assert policy == StopPolicy(rule=StopRule.WAIT_COMPLETE, cap_s=3.0)


def test_the_extra_configuration_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "extra.json"
    file.write_text('{"compare_batches": true}')

    assert parse(Given(hicache_storage_backend_extra_config=f"@{file}")).plugin.compare_batches


def test_the_former_name_of_a_key_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plugin = parsed({"witness": True}).plugin

    assert plugin.compare_batches
    assert "'witness' is now 'compare_batches'" in caplog.text


def test_both_names_of_a_key_are_refused() -> None:
    both = {"witness": True, "compare_batches": True}

    check(refusal(parsed, both), WHERE, "give 'compare_batches' alone")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "words").write_text("words")

    for name, why in (
        ("none", "cannot be read"),
        ("bytes", "cannot be read"),
        ("words", "is not valid JSON"),
    ):
        refused = refusal(parse, Given(hicache_storage_backend_extra_config=f"@{tmp_path / name}"))
        check(refused, f"{WHERE}: {tmp_path / name}", why)


def refusal(function: Callable[..., object], *values: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        function(*values, **named)
    return str(refused.value)


def check(refused: str, *parts: str) -> None:
    assert [each for each in parts if each not in refused] == [], refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"hicache_ratio": 0.0}, "hicache_ratio is 0.0, must be more than 0"),
        ({"hicache_ratio": float("inf")}, "hicache_ratio is inf, must be at most"),
        ({"hicache_size": -1}, "hicache_size is -1, must be at least 0"),
        ({"hicache_write_policy": "write_back"}, "use 'write_through_selective'"),
        ({"hicache_write_policy": "never"}, "is 'never', must be one of write_through, "),
        ({"hicache_host_memory_mode": "buffer"}, "is 'buffer', must be one of cache"),
        ({"hicache_storage_backend": "file"}, "hicache_storage_backend is 'file', a HiCache"),
    ],
)
def test_a_flag_that_is_wrong_is_refused_by_its_name(flags: dict[str, Any], named: str) -> None:
    check(refusal(parsed, **flags), named)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ([], "is a list, must be an object of keys and values"),
        ({"stor": "file:///kv"}, "no key 'stor'; known: adapter_versions, bounds,"),
        ({"store": "file:///kv"}, "only with --hicache-storage-backend dynamic; add it"),
        ({"prefetch_threshold": -1}, "prefetch_threshold is -1, must be at least 0"),
        (
            {"prefetch_timeout_per_ki_token": 1, "stop_policy": {}},
            "give either stop_policy, or prefetch_timeout_base",
        ),
    ],
)
def test_a_key_that_is_wrong_is_refused_by_its_name(extra: Any, named: str) -> None:
    refused = refusal(parsed, extra)

    check(refused, named)
    assert refused.startswith(WHERE)


@pytest.mark.parametrize(
    ("extra", "flags", "pages"),
    [
        ({}, {"hicache_ratio": None}, (200, 100)),
        ({}, {"hicache_ratio": 0.5}, (50, 25)),
        ({}, {"hicache_ratio": 0.001}, (1, 1)),
        ({"host_pages": 30}, {}, (30, 15)),
        ({"host_pages": 1}, {}, (1, 1)),
        ({"host_memory_gib": 150 / 1024}, {}, (100, 50)),
        ({"host_memory_gib": 150 / 1024}, {"hicache_size": 9}, (100, 50)),
        ({}, {"hicache_size": 1}, (635, 317)),
    ],
)
def test_host_memory_is_divided_between_pools_as_the_device_s_is(
    extra: dict[str, Any], flags: dict[str, Any], pages: tuple[int, int]
) -> None:
    found = parsed(extra, **flags).host_pages(TWO, KV_POOL)

    assert found == dict(zip(TWO, pages, strict=True))


@pytest.mark.parametrize("count", [1, 3, 7, 999, 12345, 1_000_003])
def test_a_number_of_host_pages_is_exact(count: int) -> None:
    assert parsed({"host_pages": count}).host_pages(MAIN, KV_POOL) == {KV_POOL: count}


def test_memory_for_less_than_a_page_is_refused() -> None:
    settings = parsed({"host_memory_gib": 1 / 1024})

    assert settings.host_pages(MAIN, KV_POOL) == {KV_POOL: 1}
    check(refusal(settings.host_pages, TWO, KV_POOL), "1048576 bytes", "raise --hicache-size")


def attached(
    backend: str = "dynamic",
    extra: str | None = '{"store": "file:///kv"}',
    rule: str | None = None,
) -> str:
    return store_to_attach(backend, extra, {"prefetch_policy": (rule, "wait_complete")})


def test_a_store_is_attached_by_its_uri_and_with_the_policies_of_the_start() -> None:
    assert attached() == "file:///kv"
    assert attached(rule="wait_complete") == "file:///kv"
    assert attached(extra='{"store": "file:///kv", "backend_name": "x"}') == "file:///kv"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"backend": "file"}, "the storage backend is 'file', must be 'dynamic'"),
        ({"extra": None}, "store is missing; give it"),
        (
            {"extra": '{"store": "file:///kv", "compare_batches": true}'},
            "no key 'compare_batches'; known: store",
        ),
        ({"extra": "@/a/file"}, "is not valid JSON"),
        ({"rule": "timeout"}, "prefetch_policy is 'timeout', must stay 'wait_complete'"),
    ],
)
def test_an_attach_that_says_anything_else_is_refused(
    arguments: dict[str, Any], named: str
) -> None:
    check(refusal(attached, **arguments), named)
