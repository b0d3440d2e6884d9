"""Rejects SGLang configurations that Lockstep does not support, before SGLang starts its ranks."""

import logging
from collections.abc import Callable
from typing import Any

from ...errors import ConfigError
from ..releases import require_release
from .engine.sglang_settings import WHERE, SglangSettings, parse
from .identity.key_exclusions import RELEASES

log = logging.getLogger(__name__)

_UNTRIED = "is untested with Lockstep; remove it, or run without --radix-cache-backend"

_FLAGS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("pp_size", lambda size: size > 1, f"pipeline parallelism {_UNTRIED}"),
    ("dp_size", lambda size: size > 1, f"data parallelism inside one engine {_UNTRIED}"),
    ("enable_dp_attention", bool, f"data-parallel attention {_UNTRIED}"),
    ("attn_cp_size", lambda size: size > 1, f"context parallelism {_UNTRIED}"),
    ("dcp_size", lambda size: size > 1, f"decode context parallelism {_UNTRIED}"),
    ("speculative_algorithm", bool, f"speculative decoding {_UNTRIED}"),
    ("disaggregation_mode", lambda mode: mode != "null", f"SGLang's own handoff {_UNTRIED}"),
    ("enable_streaming_session", bool, f"streaming sessions {_UNTRIED}"),
    ("enable_session_radix_cache", bool, f"sessions in the radix cache {_UNTRIED}"),
    ("enable_hisparse", bool, f"hierarchical sparse attention {_UNTRIED}"),
    ("enable_unified_memory", bool, f"unified memory {_UNTRIED}"),
    ("dllm_algorithm", bool, f"diffusion language models {_UNTRIED}"),
    (
        "enable_lora_overlap_loading",
        bool,
        "ranks admit requests when their own adapter copy is done, so they can differ; remove it",
    ),
    ("enable_int8_mamba_checkpoint", bool, f"keeping recurrent states as int8 {_UNTRIED}"),
    (
        "enable_linear_replayssm",
        bool,
        "a state does not cover tokens that are still to be replayed; remove it",
    ),
    (
        "mamba_radix_cache_strategy",
        lambda strategy: strategy == "extra_buffer_lazy",
        f"tracking recurrent states only at times {_UNTRIED}",
    ),
    ("enable_lmcache", bool, "LMCache replaces the same cache; remove it"),
    ("enable_flexkv", bool, "FlexKV replaces the same cache; remove it"),
    ("disable_radix_cache", bool, "Lockstep needs the radix cache; remove it"),
)
"""Entries (flag, predicate, reason): a value of the SGLang flag is refused if the predicate returns
True."""


def read_settings(server_args: object, resolved: object, version: str) -> SglangSettings:
    """Return the settings; raise `ConfigError` for errors found before SGLang creates its pools.

    `resolved` has SGLang's flags, with defaults filled in.
    """
    require_supported(server_args)
    settings = parse(resolved)
    unsupported = settings.plugin.unsupported_engine
    require_release("SGLang", version, RELEASES, unsupported, where=WHERE, log=log)
    return settings


def require_supported(server_args: object) -> None:
    """Raise `ConfigError` for the first flag with an unsupported value."""
    if not getattr(server_args, "enable_hierarchical_cache", False):
        raise ConfigError(
            "--radix-cache-backend lockstep needs --enable-hierarchical-cache, because only then SGLang"
            " calls its cache in each iteration; add it"
        )
    for name, refused, why in _FLAGS:
        value = getattr(server_args, name, None)
        if value is not None and refused(value):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {value!r}: {why}")
