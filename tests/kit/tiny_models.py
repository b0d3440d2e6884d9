"""Writes tiny models of any architecture with random weights, for engines under test."""

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
"""Default sizes of a tiny model, which a test's settings may override."""


def write(folder: Path, kind: str, *, seed: int = 0, **settings: Any) -> Path:
    """Write a Transformers model of type `kind` with random weights from `seed`; return its folder."""
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(SMALL | settings))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            # Draw large weights, so that each output token depends on the whole prefix and no token
            # always has the highest logit.
            if parameter.dim() >= 2 and "A_log" not in label:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder
