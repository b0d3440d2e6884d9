"""Tiny models with random weights, besides `tiny_llama`, for engines of every kind."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes that a kind of model has where it says nothing else."""


def write(folder: Path, kind: str, *, seed: int = 0, **settings: Any) -> Path:
    """Write a model of a kind of Transformers' with weights that follow from `seed`; return where."""
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(SMALL | settings))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            # Wide enough that tokens depend on all that came before, and no token wins always.
            if parameter.dim() >= 2 and "A_log" not in label:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder
