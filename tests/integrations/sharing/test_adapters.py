"""Engines share an adapter's pages only if they apply the adapter identically (rule R16)."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.sharing.peft_adapters import (
    QUERIES_AND_VALUES,
    under_sglang,
    under_vllm,
    write_adapter,
)

FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")

APPLIED_IN_TWO_WAYS: dict[str, dict[str, Any]] = {
    # Of these two engines, only vLLM reads the following fields of an adapter.
    "scaled by the root of the rank": {"use_rslora": True},
    "biases": {"bias": "lora_only"},
    "other weights of the model": {"init_lora_weights": "pissa"},
    "a field that nobody knows yet": {"use_something_new": True},
    # SGLang applies an adapter to the modules that the adapter's configuration names. vLLM applies it
    # to the modules for which the adapter has weights.
    "weights that are not named": {"target_modules": ["q_proj"]},
    "modules by a pattern": {"target_modules": "all-linear"},
    # SGLang fuses the weights of q, k and v, and of gate and up.
    "keys without queries": {"modules": ["self_attn.k_proj", "self_attn.v_proj"]},
    "queries without values": {"modules": ["self_attn.q_proj"]},
    "up without gate": {"modules": ["mlp.up_proj"]},
    "half of a product": {"sides": "A"},
    "weights of another rank": {"rank": 8, "r": 4},
    "no weights": {"modules": []},
    "of a model within a model": {"prefix": "base_model.model.language_model.model.layers.0"},
}


@pytest.mark.parametrize(
    "modules",
    [
        QUERIES_AND_VALUES,
        FUSED,
        ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        ("mlp.gate_proj",),
    ],
)
def test_a_plain_adapter_is_the_same_under_both_engines_and_all_their_options(
    tmp_path: Path, modules: tuple[str, ...]
) -> None:
    folder = write_adapter(tmp_path / "adapter", modules)

    assert under_vllm(folder) == under_sglang(folder, options="an option")


@pytest.mark.parametrize("how", APPLIED_IN_TWO_WAYS.values(), ids=APPLIED_IN_TWO_WAYS)
def test_an_adapter_that_engines_may_apply_in_two_ways_counts_with_the_engine_and_its_options(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path / "adapter", **how)

    names = {
        under_vllm(folder),
        under_vllm(folder, options="an option"),
        under_sglang(folder),
        under_sglang(folder, options="an option"),
    }

    assert len(names) == 4


@pytest.mark.parametrize("kind", ["adapter_model.bin", "more.safetensors"])
def test_an_adapter_with_other_files_of_weights_is_not_shared(tmp_path: Path, kind: str) -> None:
    """An adapter with several weight files is not shared: vLLM reads one file, but SGLang reads all."""
    folder = write_adapter(tmp_path / "adapter")
    (folder / kind).write_bytes(b"\x01" * 100)

    assert under_vllm(folder) != under_sglang(folder)


def test_an_adapter_that_has_a_version_is_shared_only_if_it_is_plain(tmp_path: Path) -> None:
    plain = write_adapter(tmp_path / "plain")
    scaled = write_adapter(tmp_path / "scaled", use_rslora=True)
    version = {"a": "1"}

    shared, own, nowhere = (
        [each(folder, versions=version) for each in (under_vllm, under_sglang)]
        for folder in (plain, scaled, tmp_path / "nowhere")
    )

    assert len({*shared}) == 1
    assert len({*own}) == len({*nowhere}) == 2


def test_an_engine_of_sglang_that_is_told_which_modules_to_apply_shares_with_none_told_otherwise(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "adapter")

    names = {
        under_vllm(folder),
        under_sglang(folder, options="q and v", shares=False),
        under_sglang(folder, options="all", shares=False),
    }

    assert len(names) == 3
