"""The scheduler's half of vLLM's plug-in, for tests in which nobody waits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.integrations.vllm.adapters import Adapters
from lockstep.integrations.vllm.lending import Lending
from lockstep.integrations.vllm.scheduler_side import SchedulerSide
from lockstep.integrations.weights import FileDigests


def side_of(
    cache: Any, lending: Lending, *, versions: Mapping[str, str] | None = None, **options: Any
) -> SchedulerSide:
    """Return a half that loads and backs up, unless the `options` say otherwise."""
    adapters = Adapters(FileDigests(Path("/proc/nowhere/digests")), versions or {})
    usual: dict[str, Any] = {"loads": True, "backs_up": True, "idle_wait_s": 0.001}
    return SchedulerSide(cache, adapters, lending=lending, **(usual | options))
