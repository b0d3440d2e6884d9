"""What an exchange costs among real processes: rounds over each transport, with no cache around.

The processes share the cores of one machine, and hosts are pretended: what goes between two of them
goes through gloo and the loopback device. So the figures hold what all ranks' processors do, and no
network.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .exchange_settings import ExchangeSettings
from .rank_processes import Measurement, run_ranks

if TYPE_CHECKING:
    from .exchange_rank import RankFigures

BLOCKS = 10
"""Into how many parts the rounds are cut whose means are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Says what one length of vector costs; microseconds for one round."""

    lanes: int
    p50_us: float
    """The median over blocks of rounds, of rank 0."""
    min_us: float
    """The quickest block."""
    cpu_us: float
    """The processor time of all threads of all ranks."""
    sleeps: float
    """How often a thread of any rank gave up its core."""
    written_bytes: float
    """What all ranks wrote through `write` and its like."""
    sockets: int
    """The sockets that the transport keeps open in rank 0."""


def measure_exchanges(settings: ExchangeSettings) -> list[Exchange]:
    """Start the ranks, and return what they measured for each length, in the order of lengths.

    Raises `LockstepError` if a rank is lost. No process is left.
    """
    from .exchange_rank import measure  # noqa: PLC0415 - needs torch, which takes seconds.

    figures = run_ranks(
        Measurement(settings.ranks, partial(measure, settings), measure.__module__, settings.cores),
        lambda _: None,
    )
    return [_exchange(of_a_length) for of_a_length in zip(*figures, strict=True)]


def _exchange(figures: "Sequence[RankFigures]") -> Exchange:
    # A rank that comes late finds its round done. Over some rounds nobody is quicker than the others.
    wall_us = figures[0].wall_us
    each = max(1, len(wall_us) // BLOCKS)
    blocks_us = [statistics.fmean(wall_us[at : at + each]) for at in range(0, len(wall_us), each)]
    return Exchange(
        lanes=figures[0].lanes,
        p50_us=statistics.median(blocks_us),
        min_us=min(blocks_us),
        cpu_us=sum(each.cpu_us for each in figures),
        sleeps=sum(each.sleeps for each in figures),
        written_bytes=sum(each.written_bytes for each in figures),
        sockets=figures[0].sockets,
    )
