"""Starts SGLang with Lockstep as its radix cache."""

import json
from pathlib import Path
from typing import Any

from tests.kit.sglang.engine import RunningEngine

HOST_PAGES = 1200
"""Number of host pages, enough for everything that a test computes."""

CROWDED = {"max_total_tokens": 2048, "max_running_requests": 4}
"""Arguments for a small device pool, which holds about four of the longest prompts."""


def lockstep_flags(store: str | None = None, **extra: Any) -> dict[str, Any]:
    """Return the SGLang arguments that select Lockstep; `extra` are Lockstep's own settings."""
    settings = {"host_pages": HOST_PAGES, **extra} | ({"store": store} if store else {})
    return {
        "radix_cache_backend": "lockstep",
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(settings),
        "hicache_storage_prefetch_policy": "wait_complete",
    }


def lockstep_engine(
    folder: Path,
    model: Path,
    *,
    tp: int = 2,
    store: str | None = None,
    extra: dict[str, Any] | None = None,
    **arguments: Any,
) -> RunningEngine:
    """Return an engine with Lockstep and a small device pool; the caller starts the engine."""
    flags: dict[str, Any] = {**CROWDED, **lockstep_flags(store, **(extra or {})), **arguments}
    return RunningEngine(folder, model, tp=tp, **flags)
