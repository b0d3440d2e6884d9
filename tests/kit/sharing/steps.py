"""Has one vLLM of one rank answer prompts one after the other, and tells what it had on the device."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.kit.vllm.plan import BLOCK_TOKENS
from tests.kit.vllm.processes import Program, run_together

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
    "distributed_executor_backend": "uni",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One prompt that is sent alone."""

    tokens: Sequence[int]
    salt: str | None = None
    keep: bool = False
    """Keep what the device has of earlier steps."""
    plant: str | None = None
    """The file of KV that takes the place of what the device has of this prompt."""


@dataclass(frozen=True, slots=True)
class Came:
    """What came of a step."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int
    kv: torch.Tensor | None
    """What the device had of it beforehand, [side, layer, token, head, element], if anything."""


def run(
    folder: Path,
    model: Path,
    steps: Sequence[Step],
    connector: dict[str, Any] | None = None,
    **arguments: Any,
) -> list[Came]:
    """Start an engine with further `arguments` of `LLM`, and return what came of each step."""
    folder.mkdir(parents=True)
    engine = {**ENGINE, "model": str(model), **arguments}
    if connector is not None:
        engine["kv_transfer_config"] = connector
    path = folder / "plan.json"
    path.write_text(json.dumps({"engine": engine, "steps": [asdict(each) for each in steps]}))
    run_together([Program("tests.kit.sharing.one_rank", [path])], folder).check()
    found = json.loads((folder / "results.json").read_text())
    return [
        Came(tokens, logprobs, cached, _kv(folder / f"kv{number}.pt"))
        for number, (tokens, logprobs, cached) in enumerate(found)
    ]


def _kv(path: Path) -> torch.Tensor | None:
    return torch.load(path) if path.exists() else None
