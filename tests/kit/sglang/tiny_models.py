"""Writes tiny models with windows or short convolutions, and LoRA adapters for `tiny_llama`."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import tiny_llama
import torch

from tests.kit.tiny_models import write

WINDOW = 64
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def make_mellum(folder: Path) -> None:
    """Write a four-layer Mellum with experts; every other layer has a sliding window."""
    write(
        folder,
        "mellum",
        **SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )


def make_lfm2(folder: Path) -> None:
    """Write a four-layer LFM2; every other layer is a short convolution."""
    layers = ["conv", "full_attention"] * 2
    write(folder, "lfm2", **SIZES, block_multiple_of=16, conv_L_cache=4, layer_types=layers)


def make_llama_adapter(folder: Path, *, seed: int, layers: int = 2, hidden: int = 128) -> None:
    """Write a LoRA adapter for the query and value projections of a `tiny_llama`.

    `layers` and `hidden` must be those of the model.
    """
    safetensors: Any = import_module("safetensors.torch")
    random = torch.Generator().manual_seed(seed)
    rank = 4
    rows = {"q_proj": hidden, "v_proj": tiny_llama.KV_HEADS * tiny_llama.HEAD_ELEMENTS}
    weights: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, outputs in rows.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, hidden, generator=random) * 0.1
            weights[f"{place}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.3
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
