"""Engines share pages only if neither has a setting that may change KV (R16)."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.identity import kv_identity as sglang
from lockstep.integrations.sharing import Share
from lockstep.integrations.vllm import kv_identity as vllm
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.orders import KV_POOL
from tests.kit.sglang.configuration import Graphs, engine
from tests.kit.sglang.configuration import Model as SglangModel
from tests.kit.sglang.configuration import Pretrained as SglangPretrained
from tests.kit.vllm.configuration import (
    Engine,
    Kept,
    Lora,
    Parallel,
    Pretrained,
    Speculative,
    of_model,
)

WEIGHTS = "files 0123"
K, V = (Column(name=name, layers=2, heads=2, elements=32) for name in "kv")
LAYOUTS = {KV_POOL: PageLayout(page_tokens=32, columns=(K, V))}
LLAMA = of_model(dtype=torch.bfloat16)
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def of_vllm(
    config: Engine = LLAMA,
    *,
    layouts: Mapping[str, PageLayout] = LAYOUTS,
    share: Share = Share.ALL,
    version: str = "0.32.0",
    given: tuple[str, ...] = (),
) -> str:
    return vllm.kv_identity(
        config,
        WEIGHTS,
        layouts,
        share=share,
        engine_version=version,
        environment=dict.fromkeys(given, "1"),
        given=given,
    )


def of_sglang(
    *,
    layouts: Mapping[str, PageLayout] = LAYOUTS,
    share: Share = Share.ALL,
    **changes: Any,
) -> str:
    return sglang.kv_identity(engine(**changes), WEIGHTS, layouts, share)


def test_both_engines_share_a_model_of_one_type_and_page_size_by_default() -> None:
    assert of_vllm() == of_sglang()
    assert of_vllm().startswith(f"{WEIGHTS}/")


def test_other_positions_that_are_proven_are_shared_and_are_others() -> None:
    one = of_vllm(of_model(dtype=torch.bfloat16, hf_config=Pretrained(LINEAR)))
    other = of_sglang(model=SglangModel(hf_config=SglangPretrained(LINEAR)))

    assert one == other != of_vllm()


def test_kernels_and_prompts_bounds_are_no_part_of_what_is_shared() -> None:
    found = {
        of_vllm(),
        of_vllm(of_model(dtype=torch.bfloat16, max_model_len=32768)),
        of_vllm(replace(LLAMA, lora_config=Lora(torch.bfloat16))),
        of_sglang(exec__kernel__attention_backend="triton"),
        of_sglang(environment={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "lockstep"}),
        of_sglang(exec__graph__cuda_graph_config=Graphs()),
    }

    assert len(found) == 1


@pytest.mark.parametrize("value", [False, 0, "", [], {}, frozenset[str]()])
def test_where_the_default_is_none_no_other_value_counts_as_none(value: Any) -> None:
    """False or an empty value differs from a default of None, which may mean "on if possible"."""
    assert of_vllm(replace(LLAMA, additional_config=value)) != of_vllm()
    assert of_sglang(model__quantization=value) != of_sglang()


def test_what_engines_put_where_the_default_is_none_is_shared_and_nothing_that_equals_it() -> None:
    def replicating(value: Any) -> str:
        config = replace(Parallel(), dcp_q_replicate=value)
        return of_vllm(replace(LLAMA, parallel_config=config))

    assert replicating(False) == of_sglang(mm__mm_process_config={}) == of_vllm()
    assert of_vllm() not in (replicating(True), replicating(0))
    assert of_sglang(mm__mm_process_config={"image": {}}) != of_vllm()


UNPROVEN_OF_VLLM: dict[str, Any] = {
    "cache_config.cache_dtype": {"config": replace(LLAMA, cache_config=Kept("fp8"))},
    "cache_config.next_field": {"config": replace(LLAMA, cache_config=Kept(next_field=1))},
    "speculative_config": {"config": replace(LLAMA, speculative_config=Speculative())},
    "additional_config": {"config": replace(LLAMA, additional_config={"anything": 1})},
    "parallel_config.worker_cls": {
        "config": replace(LLAMA, parallel_config=replace(Parallel(), worker_cls="mine.Worker"))
    },
    "lora_config.lora_dtype": {"config": replace(LLAMA, lora_config=Lora(torch.float16))},
    "version 0.34.0": {"version": "0.34.0"},
    "VLLM_NEXT": {"given": ("VLLM_NEXT",)},
    "positions of kind 'dynamic'": {
        "config": of_model(dtype=torch.bfloat16, hf_config=Pretrained(DYNAMIC))
    },
    "layers of kind sliding_attention": {
        "config": of_model(
            dtype=torch.bfloat16,
            hf_config=Pretrained(
                other_fields={"layer_types": ["full_attention", "sliding_attention"]}
            ),
        )
    },
    "sliding_window": {
        "config": of_model(
            dtype=torch.bfloat16, hf_config=Pretrained(other_fields={"sliding_window": 9})
        )
    },
    "quantization_config": {
        "config": of_model(
            dtype=torch.bfloat16,
            hf_config=Pretrained(other_fields={"quantization_config": {"bits": 4}}),
        )
    },
    "yarn' with attention_factor": {
        "config": of_model(
            dtype=torch.bfloat16,
            hf_config=Pretrained({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}),
        )
    },
    "the pool 'kv' of kv of A_LATER_ONE": {
        "layouts": {
            KV_POOL: PageLayout(page_tokens=32, columns=(replace(K, name="kv of A_LATER_ONE"),))
        }
    },
    "the pool 'window' of k, v": {"layouts": {**LAYOUTS, "window": LAYOUTS[KV_POOL]}},
}


UNPROVEN_OF_SGLANG: dict[str, Any] = {
    "model.kv_cache_dtype": {"model__kv_cache_dtype": "fp8_e4m3"},
    "model.next_field": {"model__next_field": 1},
    "spec.speculative_algorithm": {"spec__speculative_algorithm": "EAGLE3"},
    "version 0.5.24": {"version": "0.5.24"},
    "SGLANG_ROPE_CACHE_FP32": {"environment": {"SGLANG_ROPE_CACHE_FP32": True}},
    "SGLANG_NEXT": {"environment": {"SGLANG_NEXT": "1"}},
}


UNPROVEN: list[Any] = [
    *(("vLLM", of_vllm, what, options) for what, options in UNPROVEN_OF_VLLM.items()),
    *(("SGLang", of_sglang, what, options) for what, options in UNPROVEN_OF_SGLANG.items()),
]


@pytest.mark.parametrize(("engine", "of", "what", "options"), UNPROVEN)
def test_an_engine_of_which_something_is_not_proven_shares_with_its_own_kind_and_says_so(
    engine: str, of: Any, what: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, f"lockstep.integrations.{engine.lower()}")

    found = of(**options)

    assert found.startswith(f"{WEIGHTS}/{engine} ")
    assert what in caplog.messages[-1]


def test_whoever_shares_with_engines_of_one_kind_alone_shares_with_no_other() -> None:
    alone = {of_vllm(share=Share.ENGINE), of_sglang(share=Share.ENGINE)}

    assert len(alone | {of_vllm()}) == 3


def test_other_pages_of_a_model_are_other_pages() -> None:
    larger = {KV_POOL: replace(LAYOUTS[KV_POOL], page_tokens=64)}
    of_another_type = {KV_POOL: replace(LAYOUTS[KV_POOL], columns=(replace(K, dtype="float16"), V))}
    found = [of_vllm(layouts=each) for each in (LAYOUTS, larger, of_another_type)]

    assert len(set(found)) == 3
    assert found == [of_sglang(layouts=each) for each in (LAYOUTS, larger, of_another_type)]


def test_what_a_model_says_of_itself_without_canonical_bytes_is_refused() -> None:
    config = of_model(hf_config=Pretrained({"rope_type": "default", "factor": object}))
    config.model_config.hf_config.rope_parameters["made"] = (each for each in "ab")

    with pytest.raises(ConfigError, match="has no canonical bytes"):
        of_vllm(config)
