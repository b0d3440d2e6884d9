"""How near pages come to the limit that go from one group's hosts to another's, over TCP.

Two processes on one machine: one serves its host pages, the other reads them through `peer://`,
verified as they always are. The limit is the same bytes over one bare connection, from and into the
same memory, right before each turn. The medians of the rounds count, and their ratio is the figure.
Every round has fresh keys, so that each page's checksums are computed anew, as in a handoff they
are once.
"""

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from ..errors import ConfigError
from ..page_format.object_shape import PART_BYTES_MAX
from .rank_processes import Measurement, run_ranks

ROUNDS_MAX = 1000


class HandoffReport(TypedDict):
    """Holds what `lockstep bench handoff` reports. GB are 10^9 bytes of pages."""

    page_bytes: int
    bytes: int
    """The size of all pages, which each round moves once."""
    rounds: int
    handoff_gbps: float
    limit_gbps: float
    ratio: float
    handoff_cpu_s_per_gb: float
    """What both processes compute for it, in the median round."""
    limit_cpu_s_per_gb: float
    load: float
    """The machine's load in the last minute, when the measurement began."""
    python: str
    machine: str
    cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """Says what is measured."""

    page_bytes: int
    total_bytes: int = 256 << 20
    rounds: int = 9

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--page-bytes", self.page_bytes, 1, PART_BYTES_MAX),
            ("--bytes", self.total_bytes, self.page_bytes, 1 << 50),
            ("--rounds", self.rounds, 1, ROUNDS_MAX),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{option} is {value}, must be {least} to {most}")
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * self.total_bytes > there:
            raise ConfigError(
                f"--bytes is {self.total_bytes}, which are in memory twice, and there are {there}"
                " bytes of it; give less"
            )

    @property
    def pages(self) -> int:
        """The number of pages of one round."""
        return self.total_bytes // self.page_bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """Says what one turn took of one process, in seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Says what all turns took of one process."""

    handoff: list[Turn]
    limit: list[Turn]


def run(settings: HandoffSettings, say: Callable[[str], None] = lambda _: None) -> HandoffReport:
    """Measure; `say` is told what is being done. No process is left.

    Raises `LockstepError` if a process is lost, and `StorageError` if a page does not come as it was.
    """
    from .handoff_rank import measure  # noqa: PLC0415 - needs torch, which takes seconds.

    load = os.getloadavg()[0]
    server, reader = run_ranks(Measurement(2, partial(measure, settings), measure.__module__), say)
    gb = settings.pages * settings.page_bytes / 1e9
    handoff_s = statistics.median(turn.wall for turn in reader.handoff)
    limit_s = statistics.median(turn.wall for turn in reader.limit)
    return HandoffReport(
        page_bytes=settings.page_bytes,
        bytes=settings.pages * settings.page_bytes,
        rounds=settings.rounds,
        handoff_gbps=gb / handoff_s,
        limit_gbps=gb / limit_s,
        ratio=limit_s / handoff_s,
        handoff_cpu_s_per_gb=_cpu_s(server.handoff, reader.handoff) / gb,
        limit_cpu_s_per_gb=_cpu_s(server.limit, reader.limit) / gb,
        load=load,
        python=platform.python_version(),
        machine=platform.platform(),
        cpus=os.cpu_count() or 1,
    )


def _cpu_s(server: list[Turn], reader: list[Turn]) -> float:
    both = zip(server, reader, strict=True)
    return statistics.median(one.cpu + other.cpu for one, other in both)
