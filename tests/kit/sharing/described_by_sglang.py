"""Prints the KV descriptions of SGLang's model configurations, and saves their rotary caches.

This is a separate program because importing SGLang changes how a process logs, warns and exits. It
starts no engine. Arguments: the file of models (`tests.kit.sharing.models`), and the output file for
the rotary caches.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lockstep.integrations.kv_description import KvDescription
from lockstep.integrations.sglang.identity.kv_identity import settings_of
from tests.kit.sharing.models import HEAD_SIZE, POSITIONS_MAX, layouts, positions


def described(folder: str, dtype: str, page_tokens: int) -> list[Any]:
    """Return the digest of a model's KV description, and the fields that may differ between engines."""
    arguments: Any = import_module("sglang.srt.server_args").ServerArgs(
        model_path=folder,
        device="cpu",
        attention_backend="torch_native",
        dtype=dtype,
        page_size=page_tokens,
        skip_tokenizer_init=True,
    )
    import_module("sglang.srt.runtime_context").publish(arguments, role="test")
    kind: Any = import_module("sglang.srt.configs.model_config").ModelConfig
    resolved: Any = import_module("lockstep.integrations.sglang.identity.resolved").resolved
    engine = resolved(kind.from_server_args(arguments))
    model = engine.model_config
    found = KvDescription.of(model.hf_config, model.dtype, layouts(page_tokens, dtype))
    return [found.digest, [*found.unproven, *settings_of(engine).set_otherwise()]]


def cache(given: dict[str, Any]) -> torch.Tensor:
    """Return the sines and cosines of a rotary embedding."""
    make: Any = import_module("sglang.srt.layers.rotary_embedding.factory").get_rope
    scaling = {name: each for name, each in given.items() if name != "rope_theta"}
    found: torch.Tensor = make(
        HEAD_SIZE,
        HEAD_SIZE,
        POSITIONS_MAX,
        given["rope_theta"],
        True,
        None if given["rope_type"] == "default" else scaling,
        torch.float32,
        partial_rotary_factor=given.get("partial_rotary_factor", 1.0),
    ).cos_sin_cache
    return found


if __name__ == "__main__":
    models = json.loads(Path(sys.argv[1]).read_text())
    descriptions = {name: described(**each) for name, each in models.items()}
    torch.save({name: cache(given) for name, given in positions().items()}, sys.argv[2])
    json.dump(descriptions, sys.stdout)
