"""Models that a plan knows by name, with the fields of their published configurations."""

from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ...small_engine.profiles import PROFILES
from .config_fields import ConfigFields
from .model_config import PublishedModel, model_of

_SPARSE: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_experts_per_tok": 8}

PUBLISHED: Final[dict[str, dict[str, object]]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "gemma": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    "qwen-next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
    },
    "deepseek": {
        **_SPARSE,
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
    "glm": {
        **_SPARSE,
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
    },
}
"""Model configurations by profile name. `hybrid-all` is missing, because it has no published model."""


def find_model(given: str, dtype: str) -> PublishedModel:
    """Return the model for a profile's name, a `config.json`, or a directory that contains one."""
    if given in PUBLISHED:
        config = ConfigFields(PUBLISHED[given], f"the profile {given}")
        return model_of(config, dtype, PROFILES[given].model)
    path = Path(given)
    if not path.exists():
        raise ConfigError(
            f"--model is {given!r}, which is neither a file or directory nor a known name:"
            f" {', '.join(PUBLISHED)}"
        )
    return model_of(ConfigFields.read(path), dtype)
