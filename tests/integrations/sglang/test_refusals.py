"""SGLang features that Lockstep does not support are refused, each with its flag."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.refusals import require_supported

FLAGS: dict[str, tuple[Any, Any]] = {
    "pp_size": (1, 2),
    "dp_size": (1, 2),
    "enable_dp_attention": (False, True),
    "attn_cp_size": (1, 2),
    "dcp_size": (1, 2),
    "speculative_algorithm": (None, "EAGLE"),
    "disaggregation_mode": ("null", "decode"),
    "enable_streaming_session": (False, True),
    "enable_session_radix_cache": (False, True),
    "enable_hisparse": (False, True),
    "enable_unified_memory": (False, True),
    "dllm_algorithm": (None, "LowConfidence"),
    "enable_lora_overlap_loading": (None, True),
    "enable_int8_mamba_checkpoint": (False, True),
    "enable_linear_replayssm": (False, True),
    "mamba_radix_cache_strategy": ("extra_buffer", "extra_buffer_lazy"),
    "enable_lmcache": (False, True),
    "enable_flexkv": (False, True),
    "disable_radix_cache": (False, True),
}
"""For each flag: a supported value and a refused one."""
SERVED = {"enable_hierarchical_cache": True} | {name: each for name, (each, _) in FLAGS.items()}


def test_an_engine_without_any_of_it_is_served() -> None:
    require_supported(SimpleNamespace(**SERVED))


@pytest.mark.parametrize(("name", "value"), [(name, each) for name, (_, each) in FLAGS.items()])
def test_each_is_refused_by_its_flag_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        require_supported(SimpleNamespace(**SERVED | {name: value}))

    assert str(refused.value).startswith(f"--{name.replace('_', '-')} is {value!r}: ")
    assert "\n" not in str(refused.value)


def test_a_flag_that_this_sglang_does_not_have_says_nothing() -> None:
    require_supported(SimpleNamespace(enable_hierarchical_cache=True))


@pytest.mark.parametrize("flags", [{}, {"enable_hierarchical_cache": False}])
def test_without_hicache_s_calls_there_are_no_steps(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs --enable-hierarchical-cache"):
        require_supported(SimpleNamespace(**flags))
