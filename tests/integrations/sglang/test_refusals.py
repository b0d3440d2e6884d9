"""What SGLang can do and Lockstep does not serve is refused by its flag."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.sglang.refusals import require_supported

SERVED: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_streaming_session": False,
    "enable_session_radix_cache": False,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "dllm_algorithm": None,
    "enable_lora_overlap_loading": None,
    "enable_int8_mamba_checkpoint": False,
    "enable_linear_replayssm": False,
    "mamba_radix_cache_strategy": "extra_buffer",
    "enable_lmcache": False,
    "enable_flexkv": False,
    "disable_radix_cache": False,
}
REFUSED: dict[str, Any] = {
    "pp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "decode",
    "enable_streaming_session": True,
    "enable_session_radix_cache": True,
    "enable_hisparse": True,
    "enable_unified_memory": True,
    "dllm_algorithm": "LowConfidence",
    "enable_lora_overlap_loading": True,
    "enable_int8_mamba_checkpoint": True,
    "enable_linear_replayssm": True,
    "mamba_radix_cache_strategy": "extra_buffer_lazy",
    "enable_lmcache": True,
    "enable_flexkv": True,
    "disable_radix_cache": True,
}


def test_an_engine_without_any_of_it_is_served() -> None:
    require_supported(SimpleNamespace(**SERVED))


@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_by_its_flag_and_value(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_supported(SimpleNamespace(**SERVED | {name: REFUSED[name]}))

    assert str(refused.value).startswith(f"--{name.replace('_', '-')} is {REFUSED[name]!r}: ")
    assert "\n" not in str(refused.value)


def test_a_flag_that_this_sglang_does_not_have_says_nothing() -> None:
    require_supported(SimpleNamespace(enable_hierarchical_cache=True))


@pytest.mark.parametrize("flags", [{}, {"enable_hierarchical_cache": False}])
def test_without_hicache_s_calls_there_are_no_steps(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs --enable-hierarchical-cache"):
        require_supported(SimpleNamespace(**flags))
