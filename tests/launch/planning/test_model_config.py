"""Memory and work of a model follow from its `config.json`; errors name what is not understood."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.planning.config_fields import ConfigFields
from lockstep.launch.planning.model_config import PublishedModel, model_of
from lockstep.launch.planning.published import PUBLISHED, find_model
from lockstep.small_engine.profiles import PROFILES

# Configurations from Hugging Face, without fields that affect neither memory nor work.
QWEN3 = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN2 = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
GPT_OSS_20B = {
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}


def of(config: Mapping[str, object], dtype: str = "bfloat16") -> PublishedModel:
    return model_of(ConfigFields(config, "config.json"), dtype)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_each_profile_has_the_geometry_of_its_published_configuration(name: str) -> None:
    real, profile = find_model(name, "bfloat16").profile, PROFILES[name]

    assert real.model == profile.model
    assert real.full.columns == real.full.scaled == profile.full.columns
    assert [pool and pool.columns for pool in (real.window, real.state)] == [
        pool and pool.columns for pool in (profile.window, profile.state)
    ]
    assert real.description() == profile.description()
    assert real.least_sizes(64) == profile.least_sizes(64)


@pytest.mark.parametrize(
    ("config", "full", "heads", "elements"),
    [(QWEN3, 36, 8, 128), (QWEN2, 28, 4, 128)],
    ids=["qwen3", "qwen2"],
)
def test_a_model_of_full_attention_keeps_keys_and_values_of_its_kv_heads(
    config: dict[str, object], full: int, heads: int, elements: int
) -> None:
    profile = of(config).profile

    shapes = {(each.layers, each.heads, each.elements) for each in profile.full.columns}
    assert shapes == {(full, heads, elements)}
    assert (profile.window, profile.state) == (None, None)


@pytest.mark.parametrize(
    ("config", "full", "window", "tokens", "heads"),
    [(GEMMA_3_4B, 5, 29, 1024, 4), (GPT_OSS_20B, 12, 12, 128, 8)],
    ids=["gemma3", "gpt_oss"],
)
def test_layers_with_a_window_have_a_pool_of_their_own(
    config: dict[str, object], full: int, window: int, tokens: int, heads: int
) -> None:
    profile = of(config).profile

    assert profile.window is not None
    assert profile.full.columns[0].layers == full
    assert profile.window.columns[0].layers == window
    assert profile.window.window_tokens == tokens
    assert {each.heads for each in profile.window.columns} == {heads}


@pytest.mark.parametrize(
    ("name", "billions"),
    # The model's published active parameters in billions, less embeddings, which are only looked up.
    [("llama", 7.0), ("deepseek", 35.6), ("qwen-next", 3.1), ("glm", 39.0), ("gpt-oss", 4.5)],
)
def test_a_token_passes_about_as_many_weights_as_the_model_says_are_active(
    name: str, billions: float
) -> None:
    assert find_model(name, "bfloat16").work.weights / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_element_type_of_the_kv_is_chosen() -> None:
    assert {each.dtype for each in of(QWEN3, "float8_e4m3fn").profile.full.columns} == {
        "float8_e4m3fn"
    }


def test_a_directory_stands_for_the_configuration_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")

    found = [find_model(str(path), "bfloat16") for path in (tmp_path, tmp_path / "config.json")]

    assert found == [of(QWEN3)] * 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"model_type": "mamba2"},
            "model_type 'mamba2' is not supported; supported are deepseek_v2,",
        ),
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many': Expected `int`, got `str`"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: Expected `int` >= 1"),
        (
            {"num_hidden_layers": 50_000_000},
            "num_hidden_layers is 50000000: Expected `int` <= 10000",
        ),
        (
            {"num_hidden_layers": 1 << 63},
            "num_hidden_layers is 9223372036854775808: Expected `int` <=",
        ),
        ({"head_dim": 10**30}, "head_dim is 10{30}: Expected `int` <= 1073741824"),
        (
            {"model_type": "gemma2", "sliding_window": 1 << 23},
            "sliding_window is 8388608: Expected `int` <= 4194304",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 36"),
        ({"layer_types": [3]}, "layer_types is .3.: Expected `str`, got `int`"),
        (
            {"layer_types": ["chunked_attention", "full_attention"] * 18},
            "layers of the kind 'chunked_attention' are not supported",
        ),
        (
            {"model_type": "mistral", "use_sliding_window": None, "sliding_window": 4096},
            "no layer has full attention",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        of({**QWEN3, **change})


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "is no JSON object"), ("[]", "Expected `object`, got `array`")]
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=complaint):
        find_model(str(file), "bfloat16")


def test_a_device_without_an_end_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="/dev/zero is larger than 16 MiB; name another file"):
        find_model("/dev/zero", "bfloat16")
