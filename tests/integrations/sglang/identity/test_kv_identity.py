"""Engines share pages only if everything that may change KV is equal in both (rule R16)."""

import logging
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.identity.kv_identity import (
    Resolved,
    adapter_options,
    settings_of,
    weights_of,
)
from lockstep.integrations.weights import FileDigests
from tests.kit.sglang.configuration import Graphs, Model, engine

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHERE = "the extra config"


def weights_key(resolved: Resolved, digests: FileDigests, version: str | None = None) -> str:
    return weights_of(resolved, version, digests, WHERE)


def counted(resolved: Resolved) -> str:
    return settings_of(resolved).digest()


def test_whatever_may_change_kv_and_whatever_is_unknown_is_in_the_key() -> None:
    engines = [
        engine(),
        engine(version="0.5.24"),
        engine(model__dtype="float16"),
        engine(model__kv_cache_dtype="fp8_e4m3"),
        engine(model__kv_cache_dtype="fp8_e5m2"),
        engine(model__quantization="awq"),
        engine(model__next_field=1),
        engine(next_namespace__field=1),
        engine(exec__kernel__attention_backend="triton"),
        engine(exec__graph__cuda_graph_config=Graphs()),
        engine(exec__graph__cuda_graph_config=Graphs("breakable")),
        engine(environment={"SGLANG_ROPE_CACHE_FP32": True}),
        engine(environment={"SGLANG_NEXT": "1"}),
    ]

    assert len({counted(each) for each in engines}) == len(engines)


def test_what_is_operational_is_not_in_the_key() -> None:
    """Operational settings are not in the key: after a change of one, an engine finds the pages."""
    engines = [
        engine(),
        engine(parallel__tp_size=1, parallel__nccl_port=1),
        engine(device__random_seed=2, serving__port=1, schedule__mem_fraction_static=0.5),
        engine(memory__hicache_ratio=1.0, exec__comm__enable_symm_mem=True),
        engine(model__model_path="/elsewhere", model__revision=COMMIT),
        engine(environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_RUN_ID": "7"}),
    ]
    graphs = [engine(exec__graph__cuda_graph_config=Graphs(bs=sizes)) for sizes in ([1], [1, 2])]

    assert len({counted(each) for each in engines}) == 1
    assert len({counted(each) for each in graphs}) == 1


def test_what_may_change_how_an_adapter_is_applied_is_in_the_key_of_requests_that_use_one() -> None:
    default: dict[str, Any] = {"lora__lora_target_modules": None}
    options = [
        adapter_options(each)
        for each in (
            engine(**default),
            engine(version="0.5.24", **default),
            engine(lora__lora_target_modules=["q_proj"]),
            engine(lora__lora_target_modules=["q_proj", "v_proj"]),
        )
    ]

    assert len({*options}) == len(options)
    assert adapter_options(engine(lora__max_loras_per_batch=3, **default)) == options[0]


def test_where_ranks_differ_their_debug_logs_differ_in_the_lines_that_say_in_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("lockstep.integrations.sglang")
    caplog.set_level(logging.DEBUG, log.name)
    settings_of(engine()).log_parts(log)
    one = set(caplog.messages)
    caplog.clear()

    settings_of(engine(model__dtype="float16", serving__port=1)).log_parts(log)

    changed = {line.split()[0] for line in set(caplog.messages) - one}
    assert changed == {"model.dtype"}


def test_weights_that_were_read_while_the_engine_ran_are_those_of_one_that_starts_with_them(
    weights: Path, digests: FileDigests
) -> None:
    running = engine(model__load_format="dummy").reloaded(str(weights), "auto")

    assert weights_key(running, digests) == weights_key(
        engine(model__model_path=str(weights)), digests
    )


def test_the_user_s_version_stands_for_all_weights_which_are_not_read(digests: FileDigests) -> None:
    resolved = engine(
        model__model_path="/no such model",
        model__quantization_param_path="/no such file",
        model__weight_cache_mode="client",
    )

    assert weights_key(resolved, digests, version="7") == "version 7"


def test_the_weights_of_a_draft_model_count_too(weights: Path, digests: FileDigests) -> None:
    """A draft model's weights are in the key, because its layers may store KV in the same page."""
    engines = [engine(model__model_path=str(weights))] + [
        engine(
            model__model_path=str(weights),
            spec__speculative_draft_model_path="org/draft",
            spec__speculative_draft_model_revision=revision * 40,
        )
        for revision in "ab"
    ]

    assert len({weights_key(each, digests) for each in engines}) == 3


def test_files_of_scales_count_by_what_they_hold_and_not_by_their_names(
    weights: Path, tmp_path: Path, digests: FileDigests
) -> None:
    scales = [tmp_path / name for name in ("one.json", "same.json", "other.json")]
    engines = [
        engine(model__model_path=str(weights), model__quantization_param_path=str(path))
        for path in scales
    ]
    for path, text in zip(scales, ("1.0", "1.0", "2.0"), strict=True):
        path.write_text(text)

    one, same, other = (weights_key(each, digests) for each in engines)

    assert one == same != other
    assert len({counted(each) for each in engines}) == 1


def test_a_file_that_cannot_be_read_is_refused_by_the_name_of_its_field(
    weights: Path, digests: FileDigests
) -> None:
    resolved = engine(model__model_path=str(weights), spec__uno_lora_path="/nowhere")

    with pytest.raises(ConfigError, match=r"uno_lora_path /nowhere cannot be read.*; give"):
        weights_key(resolved, digests)


def test_dummy_weights_are_what_each_rank_draws(digests: FileDigests) -> None:
    one, two = (engine(model__load_format="dummy", parallel__tp_size=ranks) for ranks in (1, 2))

    assert weights_key(one, digests) != weights_key(two, digests)


@pytest.mark.parametrize(
    "resolved",
    [
        engine(model__revision="main"),
        engine(model__model_path="/nowhere"),
        engine(model__revision=COMMIT, model__load_format="remote_instance"),
        engine(model__revision=COMMIT, model__load_format="presharded"),
        engine(model__revision=COMMIT, model__model_path="s3://bucket/model"),
        engine(model__revision=COMMIT, model__weight_cache_mode="client"),
        engine(model__revision=COMMIT, model__checkpoint_engine_wait_weights_before_ready=True),
    ],
)
def test_weights_that_nobody_can_tell_apart_need_a_version(
    resolved: Resolved, digests: FileDigests
) -> None:
    with pytest.raises(ConfigError, match=r"give weights_version in the extra config"):
        weights_key(resolved, digests)


def test_an_sglang_without_a_field_that_tells_weights_apart_is_refused(
    digests: FileDigests,
) -> None:
    resolved = Resolved("0.6", {"model": {}}, Model(), {}, {})

    with pytest.raises(ConfigError, match=r"SGLang 0\.6 has no weight_cache_mode among its model"):
        weights_key(resolved, digests)
