"""vLLM and SGLang describe a model's KV identically if they compute the same KV (rule R16).

No engine runs: each plug-in describes the configurations of some models.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.sglang.processes import last_line_of
from tests.kit.sharing.models import KINDS, YARN, write_model
from tests.kit.vllm.processes import Program, run_together

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "another theta": {"rope_theta": 500000.0},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "window": {"sliding_window": 256, "kind": "mistral"},
    "long": {"rope_scaling": {**LONG, "original_max_position_embeddings": 512}},
}


@dataclass(frozen=True, slots=True)
class Descriptions:
    """An engine's descriptions, by the name of the model."""

    digests: dict[str, str]
    unproven: dict[str, list[str]]
    positions: dict[str, torch.Tensor]


def ask_vllm(folder: Path) -> Descriptions:
    kept = folder / "vllm.pt"
    arguments = [folder / "models.json", kept]
    ended = run_together([Program("tests.kit.sharing.described_by_vllm", arguments)], folder)
    ended.check()
    return read(ended.output.splitlines()[-1], kept)


def ask_sglang(folder: Path) -> Descriptions:
    kept = folder / "sglang.pt"
    return read(
        last_line_of("tests.kit.sharing.described_by_sglang", folder / "models.json", kept), kept
    )


def read(output: str, kept: Path) -> Descriptions:
    described = json.loads(output)
    return Descriptions(
        {name: each[0] for name, each in described.items()},
        {name: each[1] for name, each in described.items()},
        torch.load(kept),
    )


@pytest.fixture(scope="module")
def descriptions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Descriptions, Descriptions]:
    folder = tmp_path_factory.mktemp("described")
    usual = {"dtype": "float32", "page_tokens": 32}
    models = {kind: {"folder": write_model(folder / kind, kind), **usual} for kind in KINDS}
    for name, given in VARIANTS.items():
        models[name] = {"folder": write_model(folder / name, **given), **usual}
    models["another type"] = {**models["llama"], "dtype": "bfloat16"}
    models["another page size"] = {**models["llama"], "page_tokens": 64}
    (folder / "models.json").write_text(json.dumps(models))
    return ask_vllm(folder), ask_sglang(folder)


@pytest.mark.parametrize("model", [*KINDS, "yarn", "another theta"])
def test_both_engines_describe_a_model_alike_with_nothing_left_to_prove(
    descriptions: tuple[Descriptions, Descriptions], model: str
) -> None:
    one, other = descriptions

    assert (one.unproven[model], other.unproven[model]) == ([], [])
    assert one.digests[model] == other.digests[model]


def test_models_types_pages_and_positions_that_differ_are_told_apart(
    descriptions: tuple[Descriptions, Descriptions],
) -> None:
    one, other = descriptions

    assert one.digests == other.digests
    assert len(set(one.digests.values())) == len(one.digests)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("dynamic", "positions of kind 'dynamic'"),
        ("long", "positions of kind 'longrope'"),
        ("window", "sliding_window"),
    ],
)
def test_what_engines_compute_in_ways_of_their_own_is_shared_by_neither(
    descriptions: tuple[Descriptions, Descriptions], model: str, named: str
) -> None:
    assert [each.unproven[model] for each in descriptions] == [[named]] * 2


def test_positions_of_all_kinds_that_are_shared_are_equal_to_the_last_bit(
    descriptions: tuple[Descriptions, Descriptions],
) -> None:
    one, other = (each.positions for each in descriptions)

    assert [torch.equal(one[name], other[name]) for name in one] == [True] * 5
