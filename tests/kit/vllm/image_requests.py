"""Sends requests with images to one vLLM engine, one by one, and writes the answers to a file.

This is a separate program because an engine changes how a process logs, warns and exits. Arguments: the
model, the URI of a store (empty: no Lockstep), and the file for the answers. vLLM's processor cache is
off, because it would reuse an image's pixels for another image with the same client id.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

from tests.kit.source_tree import ROOT
from tests.kit.vllm.group import lockstep_connector
from tests.kit.vllm.plan import BLOCK_TOKENS
from tests.kit.vllm.tiny_models import IMAGE_PIXELS, IMAGE_TOKEN

STAND_INS = str(ROOT / "tests" / "install" / "stand_ins")
SYSTEM = [1, *(5 + each % 400 for each in range(2_000))]
QUESTION = list(range(100, 120))

REQUESTS: list[tuple[list[int], str | None]] = [
    ([1], None),
    ([2], None),
    ([1], None),
    ([1], "a uuid"),
    ([1, 2], None),
    ([1], "a logo"),
    ([3], "a logo"),
    ([3], None),
]
"""For each request: the seeds of its images, and the client's uuid for the first image."""


def import_without_torchvision() -> None:
    """Make vLLM import models that need torchvision, although it is not installed."""
    known: Any = import_module("transformers.utils.import_utils")
    utils: Any = import_module("transformers.utils")
    known.is_torchvision_available = utils.is_torchvision_available = lambda: False
    sys.path.append(STAND_INS)
    # Extend PYTHONPATH for subprocesses, because vLLM inspects a model's class in a subprocess.
    os.environ["PYTHONPATH"] = os.pathsep.join((os.environ.get("PYTHONPATH", ""), STAND_INS))


def image(seed: int) -> Any:
    kind: Any = import_module("PIL.Image")
    shape = (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    return kind.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8))


def main() -> None:
    """Send the requests; write the number of cached tokens and the output of each request."""
    model, store, answers = sys.argv[1:]
    import_without_torchvision()
    connector = {"kv_transfer_config": lockstep_connector(store)} if store else {}
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=3_000,
        enforce_eager=True,
        max_num_seqs=4,
        seed=0,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        limit_mm_per_prompt={"image": 2},
        mm_processor_cache_gb=0,
        distributed_executor_backend="mp",
        **connector,
    )
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    results: list[tuple[int, list[int]]] = []
    for seeds, uuid in REQUESTS:
        assert llm.reset_prefix_cache()
        tokens = [*SYSTEM, *(each for _ in seeds for each in (IMAGE_TOKEN, *QUESTION))]
        prompt: dict[str, Any] = {
            "prompt_token_ids": tokens,
            "multi_modal_data": {"image": [image(each) for each in seeds]},
        }
        prompt |= {"multi_modal_uuids": {"image": [uuid]}} if uuid else {}
        generate: Any = llm.generate
        [answer] = generate([prompt], sampling, use_tqdm=False)
        results.append((answer.num_cached_tokens, [*answer.outputs[0].token_ids]))
    Path(answers).write_text(json.dumps(results))
    llm.llm_engine.engine_core.shutdown()
