"""Model configurations whose KV descriptions are compared between vLLM and SGLang."""

import json
from pathlib import Path
from typing import Any

from lockstep.integrations.kv_description import KEYS, VALUES
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.orders import KV_POOL

HEAD_SIZE, POSITIONS_MAX = 64, 2048
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS_MAX,
}
KINDS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def positions() -> dict[str, dict[str, Any]]:
    """Return sets of rotary parameters from which vLLM and SGLang compute identical rotary caches."""
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
    ]
    return {json.dumps(each): {**each, "rope_theta": 10000.0} for each in kinds}


def layouts(page_tokens: int, dtype: str) -> dict[str, PageLayout]:
    columns = tuple(
        Column(name=name, layers=2, heads=2, elements=32, dtype=dtype) for name in (KEYS, VALUES)
    )
    return {KV_POOL: PageLayout(page_tokens=page_tokens, columns=columns)}


def write_model(folder: Path, kind: str = "llama", **fields: Any) -> str:
    """Write a model's config.json; return the folder."""
    folder.mkdir()
    # Disable the sliding window, because Mistral's configuration has one by default.
    whole = {"architectures": [KINDS[kind]], "model_type": kind, **SIZES}
    whole |= {"sliding_window": None, **fields}
    (folder / "config.json").write_text(json.dumps(whole))
    return str(folder)
