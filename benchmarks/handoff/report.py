"""How near pages come to the limit that go from one group's hosts to another's, over TCP.

Two processes on one machine: one serves its host pages, the other reads them through `peer://`,
over its connection or by a transfer engine, verified as they always are. The limit is the same bytes
over one bare connection, from and into the same memory, right before each turn. The medians of the
rounds count, and their ratio is the figure. Every round has fresh keys, so that each page's checksums
are computed anew, as in a handoff they are once. Over a connection the same is done by one that has a
secret, with authenticated frames.
"""

import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from typing import TypedDict

from ..rank_processes import Measurement, run_ranks
from .settings import HandoffSettings, Turn


class HandoffReport(TypedDict):
    """Holds what `lockstep bench handoff` reports. GB are 10^9 bytes of pages."""

    transfer: str
    """What moved the pages."""
    page_bytes: int
    bytes: int
    """The size of all pages, which each round moves once."""
    rounds: int
    handoff_gbps: float
    limit_gbps: float
    ratio: float
    authenticated_gbps: float | None
    """The same with authenticated frames; None if a transfer engine moves the pages."""
    authenticated_ratio: float | None
    """How fast that is, compared with frames that are not authenticated."""
    handoff_cpu_s_per_gb: float
    """What both processes compute for it, in the median round."""
    authenticated_cpu_s_per_gb: float | None
    limit_cpu_s_per_gb: float
    load: float
    """The machine's load in the last minute, when the measurement began."""
    python: str
    machine: str
    cpus: int


def run(settings: HandoffSettings, say: Callable[[str], None] = lambda _: None) -> HandoffReport:
    """Measure; `say` is told what is being done. No process is left.

    Raises `LockstepError` if a process is lost, and `StorageError` if a page does not come as it was.
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
