"""A real model's KV size and compute, from its `config.json`, as a profile that is not scaled down.

The `model_type` selects the family. An unknown type raises an error that names it, because a size
computed for the wrong family would be wrong without notice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ...errors import ConfigError
from ...page_format.page_layout import Column
from ...small_engine.profile import PoolGeometry, Profile, StateGeometry, WindowGeometry
from .config_fields import ConfigFields
from .layer_kinds import LayerKinds, layer_kinds
from .prompt_work import PromptWork, head_dim, work_of

CHECKPOINT_TOKENS = 1024
"""Default number of tokens between checkpoints of a recurrent state; in engines, operators choose this
number."""
_HEADS_ONLY: Final = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "olmo2", "smollm3", "glm", "glm4"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "olmoe", "ernie4_5", "ernie4_5_moe"),
)
_STANDARD: Final[Mapping[str, object]] = {}
_GEMMA_3: Final = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_LATENT: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_FAMILIES: Final[Mapping[str, Mapping[str, object]]] = {
    **dict.fromkeys(_HEADS_ONLY, _STANDARD),
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": _GEMMA_3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LATENT),
    **{kind: {**_LATENT, "index_head_dim": 128} for kind in ("deepseek_v32", "glm_moe_dsa")},
    "qwen3_next": {"full_attention_interval": 4, "head_dim": 256},
}
"""Fields that a model type's configurations may omit, with the values that the type then uses."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A real model: the sizes of its KV, and the FLOPs of its prompts."""

    profile: Profile
    """The model's pools, not scaled down."""
    work: PromptWork


def model_of(config: ConfigFields, dtype: str = "bfloat16", name: str = "") -> PublishedModel:
    """Return the model of a configuration, with KV elements of type `dtype`."""
    fields = config.text()
    kind = fields.word("model_type") or config.word("model_type")
    if kind not in _FAMILIES:
        what = f"model_type {kind!r} is not supported" if kind else "model_type is missing"
        raise ConfigError(
            f"{fields.where}: {what}; supported are {', '.join(sorted(_FAMILIES))}; or use a profile"
            " with the same KV"
        )
    fields = fields.with_defaults(_FAMILIES[kind])
    kinds = layer_kinds(fields)
    shape = _latent(fields, dtype) if fields.has("kv_lora_rank") else _heads(fields, dtype)
    profile = Profile(
        name=name or kind,
        model=config.word("_name_or_path") or name or kind,
        full=_pool(shape, kinds.full),
        window=_window(shape, kinds),
        state=_state(fields, dtype, kinds.state) if kinds.state else None,
    )
    return PublishedModel(profile, work_of(fields, kinds))


def _heads(fields: ConfigFields, dtype: str) -> tuple[Column, ...]:
    """Return the key and value columns of one layer."""
    kept = fields.number("num_key_value_heads", fields.number("num_attention_heads"))
    return tuple(
        Column(name=name, layers=1, heads=kept, elements=head_dim(fields), dtype=dtype)
        for name in ("k", "v")
    )


def _latent(fields: ConfigFields, dtype: str) -> tuple[Column, ...]:
    """Return the columns of one layer of latent attention; all ranks have the same content."""

    def column(name: str, elements: int, kind: str) -> Column:
        return Column(name=name, layers=1, heads=1, elements=elements, dtype=kind, replicated=True)

    elements = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    latent = column("latent", elements, dtype)
    if not fields.has("index_head_dim"):
        return (latent,)
    # For each token, engines keep one 8-bit index key for all heads, and one scale for each 128
    # elements of the key.
    key = fields.number("index_head_dim")
    scales = column("index_scale", -(-key // 128), "float32")
    return latent, column("index_k", key, "float8_e4m3fn"), scales


def _pool(columns: tuple[Column, ...], layers: int) -> PoolGeometry:
    whole = _in_layers(columns, layers)
    return PoolGeometry(
        columns=whole, layers=layers, elements=tuple(each.elements for each in whole)
    )


def _window(columns: tuple[Column, ...], kinds: LayerKinds) -> WindowGeometry | None:
    if not kinds.window:
        return None
    whole = _in_layers(columns, kinds.window)
    return WindowGeometry(
        columns=whole,
        layers=kinds.window,
        elements=tuple(each.elements for each in whole),
        window_tokens=kinds.window_tokens,
    )


def _state(fields: ConfigFields, dtype: str, layers: int) -> StateGeometry:
    """Return the geometry of the recurrent state of gated linear attention layers.

    The state has a float32 matrix for each value head, and the last inputs of the convolution. The
    convolution's channels are grouped by key head: each key head has a query, a key, and the values
    of its value heads.
    """
    keys, values = (fields.number(f"linear_num_{each}_heads") for each in ("key", "value"))
    key_dim, value_dim = (fields.number(f"linear_{each}_head_dim") for each in ("key", "value"))
    inputs = fields.number("linear_conv_kernel_dim") - 1
    channels = 2 * key_dim + values // keys * value_dim
    columns = (
        Column(
            name="state", layers=layers, heads=values, elements=key_dim * value_dim, dtype="float32"
        ),
        Column(name="conv", layers=layers, heads=keys, elements=inputs * channels, dtype=dtype),
    )
    return StateGeometry(
        columns=columns,
        layers=layers,
        elements=tuple(each.elements for each in columns),
        checkpoint_tokens=CHECKPOINT_TOKENS,
    )


def _in_layers(columns: tuple[Column, ...], layers: int) -> tuple[Column, ...]:
    return tuple(replace(each, layers=layers) for each in columns)
