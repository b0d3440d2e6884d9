"""Creates a small model whose random weights give varied output."""

from importlib import import_module
from pathlib import Path
from typing import Any

VOCABULARY = 512
KV_HEADS = 2
HEAD_ELEMENTS = 32


def make(folder: Path, *, layers: int = 2, hidden: int = 128, seed: int = 0) -> None:
    """Write a Llama-like model to `folder`; equal seeds give equal weights."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_ELEMENTS,
        num_hidden_layers=layers,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Use large weights, so that every output token depends on all earlier tokens and outputs
            # vary.
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
