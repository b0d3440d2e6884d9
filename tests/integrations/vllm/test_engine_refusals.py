"""Errors that a vLLM user sees: one line that names the cause, before weights are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.group import Group, lockstep_connector
from tests.kit.vllm.mixed_prompts import Prompt
from tests.kit.vllm.plan import Phase, Plan
from tests.kit.vllm.processes import last_line_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

SHORT = [Phase([Prompt(tuple(range(3, 103)))])]
SERVED: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

EXTRA: list[tuple[dict[str, Any], str]] = [
    ({"stroe": "file:///kv"}, "there is no key 'stroe'; known: adapter_versions, bounds,"),
    ({"host_pages": 0}, "host_pages is 0, must be at least 1"),
    ({"host_memory_gib": 1}, "give host_memory_gib or host_pages, but not both"),
    ({"store": "flie:///kv"}, "unknown scheme 'flie'"),
    ({"store": "file:///kv?qouta_gib=1"}, "there is no option 'qouta_gib'; known:"),
    ({"metrics_port": "9100"}, "metrics_port is '9100', must be a whole number"),
    ({"timeouts": {"lookup_s": 0}}, "timeouts.lookup_s is 0, must be more than 0"),
    ({"peers": {"secret_file": "/no/file"}}, "peers.secret_file is '/no/file', which cannot be"),
    ({"peers": {"secret": "short"}}, "has 5 bytes, must be 16 or more"),
    ({"pipeline_depth": 0}, "pipeline_depth is 0, must be 1 with one scheduler"),
    ({"share": "none"}, "share is 'none', must be one of all, engine"),
]
"""Invalid keys of `kv_connector_extra_config`, and the expected error for each."""
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, but LockstepConnector needs 1"),
    ({"kv_transfer_config": {"kv_load_failure_policy": "fail"}}, "set it to 'recompute'"),
]
"""Engine arguments that Lockstep refuses, because it does not support them."""


def test_what_is_wrong_is_the_last_line_before_any_process_is_started(
    tmp_path: Path, model: Path
) -> None:
    configurations = [
        SERVED | {"kv_transfer_config": lockstep_connector(**extra)} for extra, _ in EXTRA
    ]
    for changed, _ in ARGUMENTS:
        connector = lockstep_connector() | changed.get("kv_transfer_config", {})
        configurations.append(SERVED | changed | {"kv_transfer_config": connector})
    configurations.append(SERVED | {"kv_transfer_config": lockstep_connector()})
    (tmp_path / "configurations.json").write_text(json.dumps(configurations))

    output = last_line_of(
        "tests.kit.vllm.refused", tmp_path, model, tmp_path / "configurations.json"
    )
    *refused, served = json.loads(output)

    assert served == ""
    expected = [why for _, why in (*EXTRA, *ARGUMENTS)]
    assert [
        (why, end)
        for why, end in zip(expected, refused, strict=True)
        if not end.startswith("Lockstep: ") or why not in end or "\n" in end
    ] == []


def test_ranks_that_torchrun_starts_end_with_one_line_each_and_a_status(group: Group) -> None:
    connector = lockstep_connector(stroe="file:///kv")
    plan = Plan(model=group.model, phases=SHORT, connector=connector)

    finished = group.start_by_torchrun(plan)
    lines = [line for line in finished.stderr.splitlines() if line.startswith("Lockstep: ")]

    assert finished.returncode != 0
    assert "oading weights" not in finished.stdout + finished.stderr
    assert lines, finished.stderr[-2000:]
    assert all(
        "kv_connector_extra_config: there is no key 'stroe'; known: " in each for each in lines
    )
