"""`lockstep size`: bytes per token and pool, capacity of each tier, and the best page size."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.launch.in_process import Run, refusal


def size(lockstep: Run, folder: Path, *arguments: str) -> dict[str, Any]:
    report = folder / "size.json"
    status, _, errors = lockstep("size", *arguments, "--report", report)
    assert (status, errors) == (0, "")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def test_a_token_of_llama_takes_128_kib_that_ranks_divide(lockstep: Run, tmp_path: Path) -> None:
    found = size(lockstep, tmp_path, "--tp", "8", "--tokens", "2e6", "--device-gib", "30")

    (pool,) = found["pools"]
    device, host, storage = found["tiers"]
    assert (pool["bytes_model"], pool["bytes_rank"]) == (128 << 10, 16 << 10)
    assert found["pages"]["page_tokens"] == 64
    assert device["tokens"] == (30 << 30) // (16 << 10)
    assert host["wanted_gib"] == pytest.approx(2e6 * (16 << 10) / (1 << 30), rel=1e-4)
    # A store has a header of 4 KiB for each page and rank, in addition to the page.
    assert storage["wanted_gib"] == pytest.approx(8 * host["wanted_gib"] * (1 + 4096 / (1 << 20)))


def test_latent_attention_is_whole_on_every_rank_and_once_in_a_store(
    lockstep: Run, tmp_path: Path
) -> None:
    found = size(lockstep, tmp_path, "--model", "deepseek", "--tp", "8", "--page-tokens", "64")

    (pool,) = found["pools"]
    _, host, storage = found["tiers"]
    assert pool["bytes_model"] == pool["bytes_rank"] == 61 * 576 * 2
    assert storage["wanted_gib"] == pytest.approx(host["wanted_gib"], rel=2e-3)


@pytest.mark.parametrize(
    ("model", "pools"),
    [("gemma", ["kv", "window"]), ("qwen-next", ["kv", "state"]), ("glm", ["kv"])],
)
def test_each_kind_of_state_is_a_pool(
    lockstep: Run, tmp_path: Path, model: str, pools: list[str]
) -> None:
    found = size(lockstep, tmp_path, "--model", model)

    assert [each["pool"] for each in found["pools"]] == pools


def test_the_advised_page_is_the_smallest_whose_objects_have_a_mebibyte(
    lockstep: Run, tmp_path: Path
) -> None:
    pages = size(lockstep, tmp_path, "--model", "gpt-oss", "--tp", "4")["pages"]

    small = [each["object_bytes"] for each in pages["sizes"] if each["object_bytes"] < 1 << 20]
    assert pages["page_tokens"] == 128
    assert len(small) == 3


def test_where_no_page_comes_to_that_the_largest_is_advised(lockstep: Run) -> None:
    status, output, _ = lockstep("size", "--model", "qwen-next", "--tp", "2", "--dtype", "int8")

    assert status == 0
    assert "Pages of 256 tokens" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "-1"], "--tokens. Must be >= 0"),
        (["--tokens", "1e30"], "pages at most"),
        (["--tokens", "inf"], "--tokens. Must be < inf"),
        (["--device-gib", "inf"], "--device-gib. Must be <= 1073741824"),
        (["--host-gib", "1e300"], "--host-gib. Must be <= 1073741824"),
        (["--page-tokens", "1048576"], "a page of 1048576 tokens has a part of 17179869184 bytes"),
        (["--tp", "16"], "8 KV heads, which 16 ranks cannot divide evenly"),
        (["--model", "/"], "cannot read /config.json"),
    ],
)
def test_wrong_input_gets_one_line_and_status_2(
    lockstep: Run, arguments: list[str], complaint: str
) -> None:
    assert complaint in refusal(lockstep, "size", *arguments)
