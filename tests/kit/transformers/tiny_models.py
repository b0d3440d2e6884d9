"""Tiny models with random weights, of the kinds of layers that Transformers knows, in a folder each."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 32

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": _EVERY_OTHER,
        "query_pre_attn_scalar": 32,
    },
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": _EVERY_OTHER,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 128},
}
"""By the name of the architecture: full attention, windows, both, short convolutions."""

FULL = ["llama"]
WINDOWED = ["mistral", "gemma3_text", "gpt_oss"]


def make(folder: Path, kind: str, *, seed: int = 0, **fields: Any) -> Path:
    """Write a model of a kind with weights that follow from `seed`; return its folder."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(_COMMON | KINDS[kind] | fields))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in model.parameters():
            # With the usual weights, which are small, nearly all tokens come out alike.
            if each.dim() > 1:
                each.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """Load a model as a user does."""
    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options))
