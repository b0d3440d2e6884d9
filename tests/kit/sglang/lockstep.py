"""SGLang with Lockstep below its radix tree."""

import json
from pathlib import Path
from typing import Any

from tests.kit.sglang.engine import RunningEngine

HOST_PAGES = 1200
"""Enough host pages for everything that a test computes."""

CROWDED = {"max_total_tokens": 2048, "max_running_requests": 4}
"""A device pool for about four of the longest prompts."""


def lockstep_flags(store: str | None = None, **extra: Any) -> dict[str, Any]:
    """Return the arguments that select Lockstep; `extra` goes to its extra configuration."""
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
    """Return an engine with Lockstep and room for few prompts on the device, not started."""
    flags: dict[str, Any] = {**CROWDED, **lockstep_flags(store, **(extra or {})), **arguments}
    return RunningEngine(folder, model, tp=tp, **flags)
