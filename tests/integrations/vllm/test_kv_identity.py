"""Engines share pages only if everything that may change KV is equal in both (rule R16)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.vllm.kv_identity import settings_of, weights_of
from lockstep.integrations.weights import FileDigests
from tests.kit.vllm.configuration import (
    Engine,
    Kept,
    Load,
    Model,
    Parallel,
    Pretrained,
    Speculative,
    Transfer,
    long_rope,
    of_model,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def counted(
    engine: Engine, *, version: str = "0.32.0", environment: dict[str, object] | None = None
) -> str:
    settings = settings_of(
        engine, engine_version=version, environment=environment or {}, given=environment or ()
    )
    return settings.digest()


def drafting(rope: Pretrained) -> Engine:
    draft = Model()
    draft.hf_config = rope
    return Engine(speculative_config=Speculative(draft))


def test_whatever_may_change_kv_and_whatever_is_unknown_is_in_the_key() -> None:
    engines = [
        Engine(),
        # Phi-3's LongRoPE factors depend on `max_model_len`, so the length is in the key.
        of_model(max_model_len=32768),
        of_model(dtype=torch.bfloat16),
        of_model(quantization="awq"),
        Engine(cache_config=Kept("fp8_e4m3")),
        Engine(cache_config=Kept("fp8_e5m2")),
        Engine(cache_config=Kept(next_field=1)),
        Engine(load_config=Load("bitsandbytes")),
        Engine(speculative_config=Speculative()),
        drafting(Pretrained()),
        drafting(long_rope()),
        Engine(additional_config={"anything": 1}),
    ]

    assert len({counted(engine) for engine in engines}) == len(engines)
    assert counted(Engine(), version="0.33.0") != counted(Engine())


def test_what_is_operational_is_not_in_the_key() -> None:
    """Operational settings are not in the key: after a change of one, an engine finds the pages."""
    engines = [
        Engine(),
        Engine(instance_id="2"),
        Engine(kv_transfer_config=Transfer(engine_id="another")),
        Engine(parallel_config=Parallel(1, rank=1, master_port=1)),
        Engine(cache_config=Kept(gpu_memory_utilization=0.5)),
        Engine(load_config=Load(use_tqdm_on_load=False)),
        of_model(model="/elsewhere", tokenizer="/elsewhere", seed=7, revision=COMMIT),
    ]

    assert len({counted(engine) for engine in engines}) == 1


def test_variables_that_the_engine_reads_are_in_the_key_but_for_operational_ones() -> None:
    environments: list[dict[str, object]] = [
        {"K_SCALE_CONSTANT": 200, "VLLM_CPU_OMP_THREADS_BIND": "0"},
        {"K_SCALE_CONSTANT": 200, "VLLM_CPU_OMP_THREADS_BIND": "1"},
        {"K_SCALE_CONSTANT": 200, "VLLM_KV_CACHE_LAYOUT": "NHD"},
        {"K_SCALE_CONSTANT": 100, "VLLM_KV_CACHE_LAYOUT": "NHD"},
        {"K_SCALE_CONSTANT": 200, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": True},
    ]

    one, same, ordered, other, shuffled = (
        counted(Engine(), environment=each) for each in environments
    )

    assert one == same == ordered
    assert len({one, other, shuffled}) == 3


def test_the_user_s_version_stands_for_all_weights_which_are_not_read(digests: FileDigests) -> None:
    engine = of_model(model="/no such model")

    assert weights_of(engine, "7", digests) == "version 7"


def test_the_weights_of_a_draft_model_count_too(weights: Path, digests: FileDigests) -> None:
    """A draft model's weights are in the key, because its layers may store KV in the same page."""
    target = of_model(model=str(weights))
    drafts = [replace(Model(), model="org/draft", revision=each * 40) for each in "ab"]

    found = [
        weights_of(replace(target, speculative_config=Speculative(draft)), None, digests)
        for draft in (None, *drafts)
    ]

    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "model",
    [
        Model(model="org/model", revision=COMMIT),
        Model(model=f"/hub/models--org--model/snapshots/{COMMIT}"),
    ],
)
def test_a_model_of_the_hub_is_known_by_its_commit(model: Model, digests: FileDigests) -> None:
    assert weights_of(Engine(model_config=model), None, digests) == f"commit {COMMIT}"


def test_dummy_weights_are_what_each_rank_draws(digests: FileDigests) -> None:
    def drawn(ranks: int, seed: int) -> str:
        parallel = Parallel(tensor_parallel_size=ranks)
        engine = Engine(parallel, load_config=Load("dummy"), model_config=Model(seed=seed))
        return weights_of(engine, None, digests)

    assert len({drawn(1, 0), drawn(2, 0), drawn(2, 1)}) == 3


@pytest.mark.parametrize(
    ("model", "load"),
    [
        ({"model": "org/model", "revision": "main"}, "auto"),
        ({"model": "/nowhere"}, "auto"),
        ({"model": "org/model", "revision": COMMIT}, "tensorizer"),
        ({"model": "org/model", "model_weights": "s3://m", "revision": COMMIT}, "runai_streamer"),
    ],
)
def test_weights_that_nobody_can_tell_apart_need_a_version(
    model: dict[str, Any], load: str, digests: FileDigests
) -> None:
    engine = replace(of_model(**model), load_config=Load(load))

    with pytest.raises(ConfigError, match="give weights_version in kv_connector_extra_config"):
        weights_of(engine, None, digests)
