"""What an exchange costs among real processes: rounds over each transport, with no cache around.

The processes share the cores of one machine, and hosts are pretended: what goes between two of them
goes through gloo and the loopback device. So the figures hold what all ranks' processors do, and no
network.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from ..coordinator.collectives.base import Transport
from ..errors import LockstepError

if TYPE_CHECKING:
    from .exchange_rank import RankFigures

BLOCKS = 10
"""Into how many parts the rounds are cut whose means are compared."""

PATIENCE_S = 300.0
"""How long the ranks of one group may take for all that they measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """One group of processes, and what it exchanges."""

    ranks: int
    transport: Transport
    hosts: int = 1
    """Pretended ones, for the transport `hierarchical`; each has as many ranks."""
    lanes: tuple[int, ...]
    """The lengths of the vectors, one after the other."""
    rounds: int = 200
    cores: int | None = None
    """How many cores all ranks share; None for all that this process may use."""
    doubling: bool = False
    """Measure `exchange_rank.Doubling` in the place of the transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one length of vector costs; microseconds for one round."""

    lanes: int
    p50_us: float
    """The median over blocks of rounds, of rank 0."""
    min_us: float
    """The quickest block."""
    cpu_us: float
    """Of all threads of all ranks."""
    sleeps: float
    """How often a thread of any rank gave up its core."""
    written_bytes: float
    """Of all ranks, through `write` and its like."""
    sockets: int
    """That the transport keeps open in rank 0."""


def measure_exchanges(settings: ExchangeSettings) -> list[Exchange]:
    """Start the ranks, and return what they measured for each length, in the order of lengths.

    Raises `LockstepError` if a rank is lost or takes longer than `PATIENCE_S`. No process is left.
    """
    processes = multiprocessing.get_context("forkserver")
    # Imported once, and not by every rank.
    processes.set_forkserver_preload([f"{__package__}.exchange_rank"])
    from .exchange_rank import (  # noqa: PLC0415 - needs torch, which takes seconds.
        ExchangeSeat,
        be_exchange_rank,
    )

    ranks: list[BaseProcess] = []
    said: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-exchange-") as folder:
        try:
            for rank in range(settings.ranks):
                ours, theirs = processes.Pipe(duplex=False)
                seat = ExchangeSeat(rank, str(Path(folder) / "store"))
                process = processes.Process(
                    target=be_exchange_rank, args=(settings, seat, theirs), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(process)
                said.append(ours)
            figures = [_hear(rank, connection) for rank, connection in enumerate(said)]
        finally:
            for each in ranks:
                each.kill()
            for each in ranks:
                each.join()
            for connection in said:
                connection.close()
    return [_exchange(of_a_length) for of_a_length in zip(*figures, strict=True)]


def _hear(rank: int, connection: Connection) -> "list[RankFigures]":
    if not connection.poll(PATIENCE_S):
        raise LockstepError(f"rank {rank} took longer than {PATIENCE_S:.0f} s")
    try:
        kind, content = connection.recv()
    except EOFError:
        raise LockstepError(f"rank {rank} ended before it was through") from None
    if kind == "error":
        raise LockstepError(content)
    figures: list[RankFigures] = content
    return figures


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
