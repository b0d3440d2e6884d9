"""SGLang without Lockstep, as the reference for comparisons."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.requests import Answer, RankReport, Request
from tests.kit.vllm.mixed_prompts import mixed_prompts

REQUESTS = 30
TOLERANCE = 1e-4
"""Largest difference of log-probabilities between runs with different chunks or batches. The summation
order of float32 changes results by up to 6e-6 here."""

PROBE = "lockstep_probe"


def mixed_requests(count: int = REQUESTS) -> list[Request]:
    """Return requests whose prompts share prefixes; some prompts are identical."""
    return [Request(tokens=prompt.tokens) for prompt in mixed_prompts(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Stock SGLang's answers to `mixed_requests()`.

    The requests are sent one by one, first with an empty cache (`cold`) and then again (`warm`).
    """

    cold: list[Answer]
    warm: list[Answer]
    together: list[Answer]
    """Answers to requests that are all sent at once, after a flush of the cache."""
    after: list[RankReport]


def run_stock(folder: Path, model: Path, *, tp: int) -> Stock:
    requests = mixed_requests()
    with RunningEngine(folder, model, tp=tp, plugins=(PROBE,)) as engine:
        cold = engine.generate(requests, together=False)
        warm = engine.generate(requests, together=False)
        engine.flush()
        together = engine.generate(requests)
        after = engine.ranks()
    return Stock(cold=cold, warm=warm, together=together, after=after)


def adapters_engine(folder: Path, model: Path, **options: Any) -> RunningEngine:
    """Return an engine that serves adapters on a CPU; `options` go to `RunningEngine`.

    The caller starts the engine.
    """
    plugins = (*options.pop("plugins", (PROBE,)), "cpu_adapters")
    adapters: dict[str, Any] = {
        "enable_lora": True,
        "lora_backend": "torch_native",
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_lora_rank": 4,
        "max_loras_per_batch": 3,
    }
    return RunningEngine(folder, model, plugins=plugins, **adapters | options)
