"""Prints the digests of some engines' configurations, as SGLang resolves them.

A program of its own, since importing SGLang changes how a process logs, warns and ends. No engine runs.
"""

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.integrations.sglang.identity.kv_identity import configuration_digest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 512,
}


def counted(folder: Path, *, tp_size: int = 1, **environment: str) -> str:
    """Return the digest of an engine's configuration, where these variables are set."""
    os.environ.update(environment)
    arguments: Any = import_module("sglang.srt.server_args").ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        tp_size=tp_size,
    )
    import_module("sglang.srt.runtime_context").publish(arguments, role="test")
    model = import_module("sglang.srt.configs.model_config").ModelConfig
    resolved = import_module("lockstep.integrations.sglang.identity.resolved").resolved
    found = configuration_digest(resolved(model.from_server_args(arguments)))
    for name in environment:
        del os.environ[name]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(LLAMA))
        digests = {
            "usual": counted(Path(place)),
            "two ranks": counted(Path(place), tp_size=2),
            "set to its default": counted(Path(place), SGLANG_ROPE_CACHE_FP32="0"),
            "declared": counted(Path(place), SGLANG_ROPE_CACHE_FP32="1"),
            "undeclared": counted(Path(place), SGLANG_MOE_CONFIG_DIR="/elsewhere"),
        }
    json.dump(digests, sys.stdout)
