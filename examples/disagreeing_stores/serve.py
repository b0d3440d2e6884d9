"""One rank of vLLM, started by torchrun: computes one prompt and writes the result to a file."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

PROMPT = [(7 * number) % 500 + 3 for number in range(300)]
BLOCK_TOKENS = 32

CONNECTORS: dict[str, Any] = {
    "none": None,
    "naive": {"kv_connector": "NaiveConnector", "kv_connector_module_path": "naive"},
    "lockstep": {
        "kv_connector": "LockstepConnector",
        "kv_connector_module_path": "lockstep.integrations.vllm",
        "kv_load_failure_policy": "recompute",
    },
}
EXTRA: dict[str, Any] = {
    "naive": {"store": "stores/naive/rank{rank}"},
    "lockstep": {"host_memory_gib": 0.1, "store": "file://{here}/stores/lockstep/rank{rank}"},
}


def connector(name: str) -> Any:
    """Return the `kv_transfer_config` of a connector."""
    config = CONNECTORS[name]
    if config is None:
        return None
    store = EXTRA[name]["store"].replace("{here}", str(Path.cwd()))
    return config | {
        "kv_role": "kv_both",
        "kv_connector_extra_config": EXTRA[name] | {"store": store},
    }


def main() -> None:
    """Compute the prompt with the connector named on the command line."""
    llm = LLM(
        model="model",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        kv_transfer_config=connector(sys.argv[1]),
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    [request] = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    answer = {
        "tokens": list(request.outputs[0].token_ids),
        "cached": request.num_cached_tokens,
    }
    Path(f"{sys.argv[2]}.rank{os.environ['RANK']}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
