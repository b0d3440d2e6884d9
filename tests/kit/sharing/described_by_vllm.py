"""Prints the KV descriptions of vLLM's model configurations, and saves their rotary caches.

This is a separate program because importing vLLM changes how a process logs, warns and exits. It starts
no engine. Arguments: the file of models (`tests.kit.sharing.models`), and the output file for the
rotary caches.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lockstep.integrations.kv_description import KvDescription
from lockstep.integrations.vllm.kv_identity import settings_of
from tests.kit.sharing.models import HEAD_SIZE, POSITIONS_MAX, layouts, positions


def described(folder: str, dtype: str, page_tokens: int, **options: Any) -> list[Any]:
    """Return the digest of a model's KV description, and the fields that may differ between engines."""
    vllm: Any = import_module("vllm")
    arguments: Any = import_module("vllm.engine.arg_utils").EngineArgs
    config = arguments(
        model=folder, skip_tokenizer_init=True, dtype=dtype, block_size=page_tokens, **options
    ).create_engine_config()
    model = config.model_config
    found = KvDescription.of(model.hf_config, model.dtype, layouts(page_tokens, dtype))
    settings = settings_of(config, engine_version=vllm.__version__, environment={}, given=())
    return [found.digest, [*found.unproven, *settings.set_otherwise()]]


def caches() -> dict[str, torch.Tensor]:
    """Return the sines and cosines of each kind of rotary embedding."""
    config: Any = import_module("vllm.config")
    make: Any = import_module("vllm.model_executor.layers.rotary_embedding").get_rope
    with config.set_current_vllm_config(config.VllmConfig()):
        return {
            name: make(
                HEAD_SIZE,
                max_position=POSITIONS_MAX,
                rope_parameters=given,
                is_neox_style=True,
                dtype=torch.float32,
            ).cos_sin_cache
            for name, given in positions().items()
        }


def main() -> None:
    torch.save(caches(), sys.argv[2])
    models = json.loads(Path(sys.argv[1]).read_text())
    json.dump({name: described(**each) for name, each in models.items()}, sys.stdout)


if __name__ == "__main__":
    main()
