"""Throughput of pages moved between the hosts of two groups over TCP, compared with a bare connection.

One process serves its host pages. Another process on the same machine reads them through `peer://`,
with the usual verification. The pages move over the TCP connection of `peer://` or by a transfer
engine. Right before each measured transfer, the same bytes are sent over one bare connection, from and
to the same memory, as the upper bound. The reported ratio is the median throughput of the measured
transfers divided by that of the bare connection. Every round has new keys, so each page's checksums are
computed once, as in a real handoff. Without a transfer engine, authenticated frames are measured on a
second connection.
"""

import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from typing import TypedDict

from ..rank_processes import Measurement, run_ranks
from .handoff_settings import HandoffSettings, Turn


class HandoffReport(TypedDict):
    """The report of `lockstep bench handoff`. GB are 10^9 bytes of KV pages."""

    transfer: str
    page_bytes: int
    bytes: int
    """The total size of the pages, each of which is moved once per round."""
    rounds: int
    handoff_gbps: float
    limit_gbps: float
    ratio: float
    authenticated_gbps: float | None
    """The throughput with authenticated frames in GB/s; None with a transfer engine."""
    authenticated_ratio: float | None
    """The throughput with authenticated frames divided by the throughput with unauthenticated frames.
    """
    handoff_cpu_s_per_gb: float
    """The CPU seconds of both processes per GB moved, in the median round."""
    authenticated_cpu_s_per_gb: float | None
    limit_cpu_s_per_gb: float
    load: float
    """The machine's one-minute load average before the measurement."""
    python: str
    machine: str
    cpus: int


def run(settings: HandoffSettings, say: Callable[[str], None] = lambda _: None) -> HandoffReport:
    """Run the benchmark; `say` receives progress messages. Ends all processes that it starts.

    Raises `LockstepError` if a process is lost, and `StorageError` if a page arrives with wrong bytes.
    """
    from .rank import measure  # noqa: PLC0415 - needs torch, which takes seconds.

    load = os.getloadavg()[0]
    server, reader = run_ranks(Measurement(2, partial(measure, settings), measure.__module__), say)
    gb = settings.pages * settings.page_bytes / 1e9
    handoff_s = statistics.median(turn.wall for turn in reader.handoff)
    limit_s = statistics.median(turn.wall for turn in reader.limit)
    secret_s = statistics.median([turn.wall for turn in reader.authenticated] or [0.0])
    return HandoffReport(
        transfer=settings.transfer,
        page_bytes=settings.page_bytes,
        bytes=settings.pages * settings.page_bytes,
        rounds=settings.rounds,
        handoff_gbps=gb / handoff_s,
        limit_gbps=gb / limit_s,
        ratio=limit_s / handoff_s,
        authenticated_gbps=gb / secret_s if secret_s else None,
        authenticated_ratio=handoff_s / secret_s if secret_s else None,
        handoff_cpu_s_per_gb=_cpu_s(server.handoff, reader.handoff) / gb,
        authenticated_cpu_s_per_gb=(
            _cpu_s(server.authenticated, reader.authenticated) / gb if secret_s else None
        ),
        limit_cpu_s_per_gb=_cpu_s(server.limit, reader.limit) / gb,
        load=load,
        python=platform.python_version(),
        machine=platform.platform(),
        cpus=os.cpu_count() or 1,
    )


def _cpu_s(server: list[Turn], reader: list[Turn]) -> float:
    both = zip(server, reader, strict=True)
    return statistics.median(one.cpu + other.cpu for one, other in both)
