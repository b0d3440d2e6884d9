"""What the tier counts through vLLM's own hooks, beside what vLLM counts of any tier."""

from collections import Counter
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from ....storage_backends.base import ReadOutcome, WriteOutcome
from .transfers import Ended

CHUNKS_READ: Final = "lockstep_tier_chunks_read"
CHUNKS_WRITTEN: Final = "lockstep_tier_chunks_written"
HELD_BYTES: Final = "lockstep_tier_held_bytes"
REFUSED: Final = "refused"
"""Stands for a chunk of a job that never began."""
_AILING: Final = (
    ReadOutcome.FAILED.name,
    ReadOutcome.TIMED_OUT.name,
    WriteOutcome.FAILED.name,
    WriteOutcome.TIMED_OUT.name,
)
"""What the log tells. Stores name what is corrupt themselves, and what is missing is no trouble."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return what there is to count."""
    labels = ("tier", "outcome")
    return {
        CHUNKS_READ: OffloadingCounterMetadata(
            "Chunks that Lockstep's tier was to read, by what became of each: only ok was used.",
            labels,
        ),
        CHUNKS_WRITTEN: OffloadingCounterMetadata(
            "Chunks that Lockstep's tier was to write, by what became of each.", labels
        ),
        HELD_BYTES: OffloadingGaugeMetadata(
            "What the model keeps in the store of Lockstep's tier, where it has a quota.", ("tier",)
        ),
    }


def count(stats: OffloadingConnectorStats, tier: str, job: Ended) -> None:
    """Count the chunks of a job by their outcomes."""
    name = CHUNKS_READ if job.is_read else CHUNKS_WRITTEN
    for outcome, chunks in _outcomes(job).items():
        stats.increase_counter(name, chunks, (tier, outcome))


def hold(stats: OffloadingConnectorStats, tier: str, nbytes: int) -> None:
    """Note how much is kept."""
    stats.set_gauge(HELD_BYTES, nbytes, (tier,))


def ailing(job: Ended) -> str:
    """Return what the log is to tell of a job; nothing if there is nothing to tell."""
    if job.was_refused:
        return f"{len(job.keys)} refused"
    bad = Counter(each.name for each in job.outcomes if each.name in _AILING)
    said = ", ".join(f"{count} {name}" for name, count in sorted(bad.items()))
    return f"{said} of {len(job.outcomes)} chunks" if said else ""


def _outcomes(job: Ended) -> Counter[str]:
    if job.was_refused:
        return Counter({REFUSED: len(job.keys)})
    return Counter(each.name.lower() for each in job.outcomes)
