"""Tiny models with random weights that are the same for one seed; `tiny_llama` is the plain one."""

from importlib import import_module
from pathlib import Path
from typing import Any

WINDOW = 64


def make_mellum(folder: Path, *, seed: int = 0) -> None:
    """Write a Mellum of four layers, every other one of which attends to a window, with experts."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.MellumConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.MellumForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                # Wide enough that tokens depend on all that came before, and no token wins always.
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
