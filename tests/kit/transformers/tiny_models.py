"""Writes tiny models with random weights, one architecture for each kind of attention layers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.kit.tiny_models import write

WINDOW = 32

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
}
"""Model settings by architecture: with full attention, sliding windows, or both."""

FULL = ["llama"]
WINDOWED = ["mistral", "gemma3_text", "gpt_oss"]


def make(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a model of type `kind` with random weights from `seed`; return its folder."""
    return write(folder, kind, seed=seed, head_dim=32, **KINDS[kind])


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options))
