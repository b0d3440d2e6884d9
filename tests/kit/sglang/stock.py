"""SGLang without Lockstep, for comparison: with its prefix cache alone, and with HiCache on a CPU."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.requests import Answer, RankReport, Request
from tests.kit.vllm.mixed_prompts import mixed_prompts

REQUESTS = 30
TOLERANCE = 1e-4
"""Of log-probabilities, where a request was computed in other chunks or beside others: sums of float32
come out otherwise by up to 6e-6 here."""

PROBE = "lockstep_probe"


def mixed_requests(
    count: int = REQUESTS, *, output_tokens: int = 8, salts: int = 0
) -> list[Request]:
    """Return requests with shared prefixes, some of them the whole; with salts, of tenants in turn."""
    return [
        Request(tokens=prompt.tokens, salt=prompt.salt, output_tokens=output_tokens)
        for prompt in mixed_prompts(count, salts=salts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What stock SGLang says to the same requests, each time in turn, but for `together`."""

    cold: list[Answer]
    warm: list[Answer]
    cold_again: list[Answer]
    """After a flush."""
    warm_again: list[Answer]
    together: list[Answer]
    """All sent at once, after a flush."""
    before: list[RankReport]
    """Of each rank, before the first of these."""
    after: list[RankReport]


def run_stock(
    folder: Path,
    model: Path,
    *,
    tp: int,
    requests: Sequence[Request] | None = None,
    plugins: Sequence[str] = (PROBE,),
    **arguments: Any,
) -> Stock:
    """Start stock SGLang, and return what it says to the requests, or to `mixed_requests()`."""
    requests = mixed_requests() if requests is None else requests
    with RunningEngine(folder, model, tp=tp, plugins=plugins, **arguments) as engine:
        before = engine.ranks()
        cold = engine.generate(requests, together=False)
        warm = engine.generate(requests, together=False)
        engine.flush()
        cold_again = engine.generate(requests, together=False)
        warm_again = engine.generate(requests, together=False)
        engine.flush()
        together = engine.generate(requests)
        after = engine.ranks()
    return Stock(
        cold=cold,
        warm=warm,
        cold_again=cold_again,
        warm_again=warm_again,
        together=together,
        before=before,
        after=after,
    )


def adapters_engine(folder: Path, model: Path, *, tp: int = 2, **options: Any) -> RunningEngine:
    """Return an engine that serves adapters on a CPU, not started; `options` are `RunningEngine`'s."""
    plugins = (*options.pop("plugins", (PROBE,)), "cpu_adapters")
    adapters: dict[str, Any] = {
        "enable_lora": True,
        "lora_backend": "torch_native",
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_lora_rank": 4,
        "max_loras_per_batch": 3,
    }
    return RunningEngine(folder, model, tp=tp, plugins=plugins, **adapters | options)


def hicache_engine(
    folder: Path, model: Path, *, tp: int = 2, store: Path | None = None, **arguments: Any
) -> RunningEngine:
    """Return an engine with HiCache, not started; with files in `store`, if that is given.

    Its device pool holds four prompts or so. Copies are `direct`, as `cpu_hicache` supplies them.
    """
    tiers: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "max_total_tokens": 2048,
        "max_running_requests": 4,
    }
    if store is not None:
        tiers |= {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 16}),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
    return RunningEngine(
        folder,
        model,
        tp=tp,
        plugins=(PROBE, "cpu_hicache"),
        environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store or folder / "store")},
        **tiers | arguments,
    )
