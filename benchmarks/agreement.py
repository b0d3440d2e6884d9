"""Cost of one step's agreement, compared with a bare all_reduce and with one collective per request.

Each rank is a process with a real cache. The cache's store never answers, so a fixed number of
prefetches remains in flight, and every ballot has lanes for them. One run measures the following
alternately, with one core per rank if possible:

- `blocking`: a whole step at depth 0, with ballot, round and verdict.
- `idle step`: the same step with a real executor and no operation in flight.
- `pipelined stall`: how long a step at depth 1 waits for the previous step's round, after some
  computation. The ranks start together, like forward passes. On shared cores, ranks also wait for
  each other's work.
- `exchange alone`: rounds of the transport back to back, without a ballot.
- lower bounds: one bare `all_reduce` of the same vector over gloo; one bare exchange of the vector
  over shared memory (`BareExchange`).
- `per request`: 1 + K all_reduces of one lane for K prefetches, the cost of code that votes once per
  request.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from typing import TypedDict

from .agreement_settings import AgreementSettings
from .rank_processes import Measurement, run_ranks


class LatencyPercentiles(TypedDict):
    """Latency percentiles of one measured call, in microseconds."""

    p50: float
    p99: float


class BareLimits(TypedDict):
    """Median duration of one bare exchange of a round's vector, by transport, in microseconds."""

    gloo: float
    shm: float


class Ratios(TypedDict):
    """Ratios of median durations; each field names the two calls that it compares."""

    per_request_to_blocking: float
    gloo_to_blocking: float
    gloo_to_exchange: float
    exchange_to_shm: float


class AgreementReport(TypedDict):
    """The report of `lockstep bench agreement`, from rank 0; times in microseconds."""

    ranks: int
    operations: int
    transport: str
    """The transport of the rounds, and the reason for its choice."""
    lanes: int
    blocking_us: LatencyPercentiles
    idle_step_us: LatencyPercentiles
    exchange_us: LatencyPercentiles
    """The duration of the round in a blocking step: launch and wait, including the wait for slower
    ranks."""
    exchange_alone_us: LatencyPercentiles
    """The duration of one round of the transport. The rounds run back to back, without ballots."""
    python_us: LatencyPercentiles
    """The duration of a blocking step minus the duration of its round."""
    pipelined_stall_us: LatencyPercentiles
    """The time that a pipelined step waits for the completion of the previous step's round."""
    pipelined_wait_us: LatencyPercentiles
    """`pipelined_stall_us` plus the time to read the round's result."""
    pipelined_step_us: LatencyPercentiles
    """The duration of a whole step at depth 1, including the wait for the previous step's round."""
    work_us: int
    hosts: int
    """The number of hosts that the ranks pretend to run on."""
    blocks: int
    collectives_per_step: float
    limit_us: BareLimits
    per_request_us: float
    ratios: Ratios
    cores: int
    python: str


def run(settings: AgreementSettings, progress: Callable[[str], None]) -> AgreementReport:
    """Start the ranks, run the measurement, and return rank 0's report.

    Raises `ConfigError` if the transport is unavailable, and `LockstepError` if a rank is lost.
    """
    from .agreement_rank import measure  # noqa: PLC0415 - needs torch, which takes seconds.

    progress(f"starting {settings.ranks} ranks")
    figures = run_ranks(
        Measurement(settings.ranks, partial(measure, settings), measure.__module__), progress
    )
    return figures[0] | _about(settings)  # type: ignore[return-value]


def _about(settings: AgreementSettings) -> dict[str, object]:
    return {
        "ranks": settings.ranks,
        "operations": settings.operations,
        "work_us": settings.work_us,
        "hosts": settings.hosts,
        "blocks": settings.blocks,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
