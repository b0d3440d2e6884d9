"""One rank of the measurement of exchanges: rounds over a transport, with no cache around them."""

import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..coordinator.collective import PendingRound, Vector
from ..coordinator.collectives.connecting import connect
from ..coordinator.collectives.torch_gloo import TorchCollective
from ..errors import LockstepError
from .rank_processes import Member, Say

if TYPE_CHECKING:
    from .exchange_settings import ExchangeSettings

TIMEOUT_S = 120.0

WARM_ROUNDS = 10


class RankFigures(NamedTuple):
    """Holds what one rank measured of one length of vector."""

    lanes: int
    wall_us: list[float]
    """How long each round took, its launch and its wait."""
    cpu_us: float
    """The processor time of all threads for one round, as a mean."""
    sleeps: float
    """How often a thread gave up its core, for one round; the mean."""
    written_bytes: float
    """What was given to `write` and its like, for one round: what gloo sends, headers included."""
    sockets: int = 0
    """The sockets that the transport keeps open."""


class Launcher(Protocol):
    """The part of a transport that an exchange needs."""

    def launch(self, lanes: Vector) -> PendingRound:
        """See `Collective`."""
        ...

    def close(self) -> None:
        """See `Collective`."""
        ...


class Doubling:
    """A MIN over ranks whose number is a power of two, in as many steps as it has bits.

    In step i a rank swaps its minimum so far with the rank whose number differs in bit i. What the
    ring of gloo could be replaced with; measured here, and no transport.
    """

    def __init__(self, group: Any) -> None:
        """`group` is a gloo group of all ranks, for this alone."""
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._lanes: Vector = np.empty(0, dtype=np.int64)

    def launch(self, lanes: Vector) -> PendingRound:
        """Keep the lanes; all of it happens in `wait`."""
        self._lanes = lanes
        return self

    def wait(self, timeout_s: float) -> Vector:
        """See `PendingRound`."""
        mine, theirs = self._lanes, np.empty_like(self._lanes)
        bit = 1
        while bit < self._ranks:
            other = self._rank ^ bit
            coming: Any = dist.irecv(torch.from_numpy(theirs), other, self._group)
            going: Any = dist.isend(torch.from_numpy(mine), other, self._group)
            coming.wait(timedelta(seconds=timeout_s))
            going.wait(timedelta(seconds=timeout_s))
            np.minimum(mine, theirs, out=mine)
            bit *= 2
        return mine

    def close(self) -> None:
        """Do nothing: the group goes with the process."""


def measure(settings: "ExchangeSettings", member: Member, say: Say) -> list[RankFigures]:
    """Measure each length as one of the ranks."""
    del say
    # All groups are made before any is used, so that their sockets can be counted.
    dist.barrier()
    sockets = _sockets()
    launchers = [_launcher(settings, member, lanes) for lanes in settings.lanes]
    dist.barrier()
    sockets = (_sockets() - sockets) // len(launchers)
    measured = [
        _measure(settings, launcher, lanes)._replace(sockets=sockets)
        for launcher, lanes in zip(launchers, settings.lanes, strict=True)
    ]
    for launcher in launchers:
        launcher.close()
    return measured


def _measure(settings: "ExchangeSettings", launcher: Launcher, lanes: int) -> RankFigures:
    rank = dist.get_rank()
    vector = np.full(lanes, rank, dtype=np.int64)
    for _ in range(WARM_ROUNDS):
        folded = launcher.launch(vector.copy()).wait(TIMEOUT_S)
        if folded.any():
            raise LockstepError(f"rank {rank} has not got the minimum of all lanes")
    dist.barrier()
    wall_us: list[float] = []
    before = _Used.now()
    for _ in range(settings.rounds):
        mine = vector.copy()
        began = time.perf_counter()
        launcher.launch(mine).wait(TIMEOUT_S)
        wall_us.append((time.perf_counter() - began) * 1e6)
    used = _Used.now()
    rounds = settings.rounds
    return RankFigures(
        lanes=lanes,
        wall_us=wall_us,
        cpu_us=(used.cpu_s - before.cpu_s) / rounds * 1e6,
        sleeps=(used.sleeps - before.sleeps) / rounds,
        written_bytes=(used.written_bytes - before.written_bytes) / rounds,
    )


def _launcher(settings: "ExchangeSettings", member: Member, lanes: int) -> Launcher:
    if settings.doubling:
        return Doubling(dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)))
    group = TorchCollective.create(timeout_s=TIMEOUT_S)
    host = member.pretended_host(settings.hosts)
    return connect(group, settings.transport, lanes=lanes, timeout_s=TIMEOUT_S, host=host)


def _sockets() -> int:
    links = (entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return sum(str(link).startswith("socket:") for link in links)


class _Used(NamedTuple):
    cpu_s: float
    sleeps: int
    written_bytes: int

    @classmethod
    def now(cls) -> "_Used":
        counts = dict(
            line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines()
        )
        sleeps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        return cls(time.process_time(), sleeps, int(counts["wchar"]))
