"""The model profiles: published geometries and their scaling for a replay.

Numbers are from each model's `config.json`; comments name the field if the field is not obvious. In
every profile, a page of 64 tokens takes at most 16 KiB over all pools, and a state takes less than 16
KiB. So a replay's speed depends on the protocol, not on the memory bandwidth.
"""

from ..errors import ConfigError
from ..page_format.page_layout import Column
from .profile import PoolGeometry, Profile, StateGeometry, WindowGeometry


def _keys_and_values(layers: int, heads: int, elements: int) -> tuple[Column, ...]:
    return tuple(
        Column(name=name, layers=layers, heads=heads, elements=elements) for name in ("k", "v")
    )


def _latent(layers: int) -> Column:
    """Return the column of multi-head latent attention, replicated on all ranks.

    DeepSeek-V3 and GLM-5 both have a latent of 512 elements (`kv_lora_rank`) and a rotary key of 64
    elements (`qk_rope_head_dim`). Engines keep both as one row.
    """
    return Column(name="latent", layers=layers, heads=1, elements=512 + 64, replicated=True)


def _index_keys(layers: int) -> tuple[Column, ...]:
    """Return the columns of the sparse-attention index: 8-bit keys and their scales.

    All index heads share one key of `index_head_dim` 128. Engines quantise in blocks of 128 elements,
    so a token has one scale.
    """
    return (
        Column(
            name="index_k",
            layers=layers,
            heads=1,
            elements=128,
            dtype="float8_e4m3fn",
            replicated=True,
        ),
        Column(
            name="index_scale", layers=layers, heads=1, elements=1, dtype="float32", replicated=True
        ),
    )


def _gated_delta_net(layers: int) -> tuple[Column, ...]:
    """Return the columns of the state that Qwen3-Next's linear-attention layers keep.

    `state` has a matrix for each of the 32 heads (`linear_num_value_heads`). The matrix has 128 rows
    (`linear_key_head_dim`) and 128 columns (`linear_value_head_dim`) in float32 (`mamba_ssm_dtype`).

    `conv` has the last 3 inputs of the convolution (`linear_conv_kernel_dim` - 1). Its channels belong
    to 16 heads (`linear_num_key_heads`), each with a query and a key of 128 and two values of 128.
    """
    return (
        Column(name="state", layers=layers, heads=32, elements=128 * 128, dtype="float32"),
        Column(name="conv", layers=layers, heads=16, elements=3 * (128 + 128 + 2 * 128)),
    )


_LLAMA = Profile(
    name="llama",
    model="Llama-3-8B",
    full=PoolGeometry(columns=_keys_and_values(32, 8, 128), layers=2, elements=(4, 4)),
)

# Gemma-3 has 48 layers; `sliding_window_pattern` is 6, so every sixth layer has full attention.
_GEMMA = Profile(
    name="gemma",
    model="Gemma-3-12B",
    full=PoolGeometry(columns=_keys_and_values(8, 8, 256), layers=1, elements=(1, 1)),
    window=WindowGeometry(
        columns=_keys_and_values(40, 8, 256), layers=5, elements=(1, 1), window_tokens=1024
    ),
)

# Qwen3-Next has 48 layers; `full_attention_interval` is 4, so every fourth layer has full attention. A
# state of the real model is as large as the keys and values of 3,000 tokens, so checkpoints must be far
# apart.
_QWEN_NEXT = Profile(
    name="qwen-next",
    model="Qwen3-Next-80B-A3B",
    full=PoolGeometry(columns=_keys_and_values(12, 2, 256), layers=1, elements=(16, 16)),
    state=StateGeometry(
        columns=_gated_delta_net(36), layers=3, elements=(16, 3), checkpoint_tokens=1024
    ),
)

# gpt-oss has 36 layers; `layer_types` alternates between sliding-window and full attention.
_GPT_OSS = Profile(
    name="gpt-oss",
    model="gpt-oss-120b",
    full=PoolGeometry(columns=_keys_and_values(18, 8, 64), layers=1, elements=(4, 4)),
    window=WindowGeometry(
        columns=_keys_and_values(18, 8, 64), layers=1, elements=(4, 4), window_tokens=128
    ),
)

_DEEPSEEK = Profile(
    name="deepseek",
    model="DeepSeek-V3",
    full=PoolGeometry(columns=(_latent(61),), layers=2, elements=(36,)),
)

_GLM = Profile(
    name="glm",
    model="GLM-5",
    full=PoolGeometry(columns=(_latent(78), *_index_keys(78)), layers=2, elements=(36, 8, 1)),
)

# Add a synthetic model with all features. Its full attention has Llama's heads as 8-bit values with
# scales, and the column of a sparse-attention index, which every rank stores. Its window is longer than
# that of gpt-oss. Its recurrent states are like Qwen3-Next's, but in more layers.
_HYBRID_ALL = Profile(
    name="hybrid-all",
    model="a model with every kind of state",
    full=PoolGeometry(
        columns=(
            Column(name="k", layers=12, heads=8, elements=128, dtype="int8"),
            Column(name="v", layers=12, heads=8, elements=128, dtype="int8"),
            Column(name="scale", layers=12, heads=8, elements=2, dtype="float32"),
            _index_keys(12)[0],
        ),
        layers=1,
        elements=(4, 4, 2, 8),
    ),
    window=WindowGeometry(
        columns=_keys_and_values(12, 8, 128), layers=1, elements=(2, 2), window_tokens=512
    ),
    state=StateGeometry(
        columns=_gated_delta_net(24), layers=2, elements=(8, 3), checkpoint_tokens=1024
    ),
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (_LLAMA, _GEMMA, _QWEN_NEXT, _GPT_OSS, _DEEPSEEK, _GLM, _HYBRID_ALL)
}


def find_profile(name: str) -> Profile:
    """Return the profile called `name`, or raise `ConfigError` that lists all profiles."""
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise ConfigError(f"--profile is {name!r}, must be one of: {known}")
    return PROFILES[name]
