"""What a step's agreement costs, beside a bare all_reduce and beside one collective per request.

Each rank is a process with a real cache whose store never answers, so that a fixed number of
prefetches stays in every ballot. The things below are measured in turns in the same run, each rank on
a core of its own if there are enough:

- `blocking`: a whole step at depth 0: ballot, round, verdict, all of it.
- `idle step`: the same of an open cache with its own executor and nothing in flight.
- `pipelined stall`: how long a step at depth 1 waits until the round of the step before is back, when
  the caller has computed for a while in between. The ranks begin together, as the forward passes of
  tensor parallelism do. Where they share cores, a rank waits for the work of others, too.
- `exchange alone`: one round of the transport after the other, without a ballot.
- limits: one bare `all_reduce` of the same vector over gloo; one bare exchange of it over shared
  memory (`BareExchange`).
- `per request`: 1 + K all_reduces of one lane, which is what a vote inside per-request code comes to.
"""

import os
import platform
from collections.abc import Callable
from functools import partial
from typing import TypedDict

from .agreement_settings import AgreementSettings
from .rank_processes import Measurement, run_ranks


class LatencyPercentiles(TypedDict):
    """Microseconds of many repetitions of one thing."""

    p50: float
    p99: float


class BareLimits(TypedDict):
    """Says what bare calls cost with the same vector, at the median, in microseconds."""

    gloo: float
    """One all_reduce over gloo."""
    shm: float
    """One exchange over shared memory that does nothing else."""


class Ratios(TypedDict):
    """Says how many times as long something takes as something else, by medians."""

    per_request_to_blocking: float
    gloo_to_blocking: float
    gloo_to_exchange: float
    exchange_to_shm: float


class AgreementReport(TypedDict):
    """Holds what `lockstep bench agreement` reports of rank 0; times in microseconds."""

    ranks: int
    operations: int
    transport: str
    """What carried the rounds, and why."""
    lanes: int
    """The length of every vector."""
    blocking_us: LatencyPercentiles
    idle_step_us: LatencyPercentiles
    exchange_us: LatencyPercentiles
    """The transport's part of `blocking_us`: launch and wait, also for a rank that is behind."""
    exchange_alone_us: LatencyPercentiles
    """Rounds of the transport without anything in between."""
    python_us: LatencyPercentiles
    """The rest of `blocking_us`."""
    pipelined_stall_us: LatencyPercentiles
    """Until the round was back."""
    pipelined_wait_us: LatencyPercentiles
    """`pipelined_stall_us`, and the reading of what all ranks said."""
    pipelined_step_us: LatencyPercentiles
    """The whole of a step at depth 1, wait included."""
    work_us: int
    hosts: int
    """How many hosts the ranks were told they are on."""
    blocks: int
    collectives_per_step: float
    limit_us: BareLimits
    per_request_us: float
    ratios: Ratios
    cores: int
    python: str


def run(settings: AgreementSettings, progress: Callable[[str], None]) -> AgreementReport:
    """Start the ranks, let them measure, and return what rank 0 has measured.

    Raises `ConfigError` if the transport cannot be had, and `LockstepError` if a rank is lost.
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
