"""Creates scheduler sides of the vLLM plug-in that wait only 1 ms when idle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.integrations.vllm.adapters import adapter_weights
from lockstep.integrations.vllm.connector_settings import ConnectorSettings
from lockstep.integrations.vllm.lent_blocks import LentBlocks
from lockstep.integrations.vllm.request_identities import RequestIdentities
from lockstep.integrations.vllm.scheduler_side import SchedulerSide
from lockstep.integrations.weights import FileDigests


def side_of(
    cache: Any,
    lending: LentBlocks,
    *,
    versions: Mapping[str, str] | None = None,
    own_embeddings: bool = True,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> SchedulerSide:
    """Return a scheduler side that loads and backs up. `options` can disable loads or backups."""
    adapters = adapter_weights(FileDigests(Path("/proc/nowhere/digests")), versions or {})
    arrivals = RequestIdentities(cache, adapters, own_embeddings=own_embeddings)
    read = ConnectorSettings.read({"host_pages": 1, "idle_wait_s": 0.001, **(settings or {})})
    chosen: dict[str, Any] = {"loads": True, "backs_up": True, **options}
    return SchedulerSide(cache, arrivals, lending, read, **chosen)
