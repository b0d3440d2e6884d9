"""Starts rank processes, joins them over gloo, collects their results, and always ends them."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import LockstepError

if TYPE_CHECKING:
    from ..coordinator.collectives.shared_memory import HostIdentity

FiguresT = TypeVar("FiguresT")

SILENT_S = 300.0
"""Seconds without a message from any rank after which the run fails."""

JOIN_S = 120.0
"""Maximum seconds until the ranks have formed their process group."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank process of a benchmark."""

    rank: int
    ranks: int
    folder: Path
    """The folder in which the ranks rendezvous and share files."""

    def pretended_host(self, hosts: int) -> "HostIdentity":
        """Return a simulated host identity for this rank.

        The ranks are divided evenly over `hosts` simulated hosts.
        """
        from ..coordinator.collectives.shared_memory import HostIdentity  # noqa: PLC0415 - see `run_ranks`.

        here = HostIdentity.here()
        if hosts == 1:
            return here
        return HostIdentity(here.boot, f"{here.processes} {self.rank * hosts // self.ranks}")


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measurement(Generic[FiguresT]):
    """A measurement: the function that each rank runs, and the number of ranks."""

    ranks: int
    measure: Callable[[RankProcess, Say], FiguresT]
    """The function that runs in each process once `torch.distributed` is initialised. The function and
    its result are pickled."""
    module: str
    """The module that `measure` needs, imported once before any rank starts."""


def run_ranks(measurement: Measurement[FiguresT], progress: Say) -> list[FiguresT]:
    """Run the measurement; return its results by rank. `progress` receives the ranks' messages.

    Raises the error of a failed rank, and `LockstepError` if a rank is lost or all ranks are silent for
    `SILENT_S`. All processes have ended on return. Importing this module does not import torch, which
    takes seconds.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([measurement.module])
    _start_fork_server()
    ranks: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        try:
            for rank in range(measurement.ranks):
                ours, theirs = processes.Pipe(duplex=False)
                member = RankProcess(rank, measurement.ranks, Path(folder))
                process = processes.Process(
                    target=_be_rank, args=(measurement.measure, member, theirs), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(process)
                connections.append(ours)
            return _collect(connections, progress)
        finally:
            for each in ranks:
                each.kill()
            for each in ranks:
                each.join()
            for connection in connections:
                connection.close()


def _start_fork_server() -> None:
    """Start the fork server with SIGINT blocked, so that the server and the ranks ignore Ctrl-C.

    Otherwise every process would print a traceback after Ctrl-C. The parent process ends the ranks
    instead.
    """
    # Start Python's resource tracker before SIGINT is blocked, because starting the tracker unblocks
    # SIGINT.
    resource_tracker.ensure_running()
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)


def _collect(connections: list[Connection], progress: Say) -> list[Any]:
    figures: dict[int, Any] = {}
    open_ones = {connection: rank for rank, connection in enumerate(connections)}
    while open_ones:
        spoke = wait(list(open_ones), SILENT_S)
        if not spoke:
            ranks = ", ".join(map(str, open_ones.values()))
            raise LockstepError(f"ranks {ranks} sent nothing for {SILENT_S:.0f} s")
        for ready in spoke:
            assert isinstance(ready, Connection)
            rank = open_ones[ready]
            try:
                kind, content = ready.recv()
            except EOFError:
                raise LockstepError(f"rank {rank} exited before it had finished") from None
            if kind == "error":
                raise content
            if kind == "progress":
                progress(content)
                continue
            figures[rank] = content
            del open_ones[ready]
    return [figures[rank] for rank in range(len(connections))]


def _be_rank(
    measure: Callable[[RankProcess, Say], object], member: RankProcess, say: Connection
) -> None:
    """Run the measurement as one rank, and send its result or error to the parent process."""
    import torch  # noqa: PLC0415 - see `run_ranks`.
    import torch.distributed as dist  # noqa: PLC0415 - as above.

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{member.folder / 'store'}",
            rank=member.rank,
            world_size=member.ranks,
            timeout=timedelta(seconds=JOIN_S),
        )
        figures = measure(member, lambda text: say.send(("progress", text)))
        say.send(("figures", figures))
        dist.barrier()
        dist.destroy_process_group()
    except LockstepError as error:
        say.send(("error", type(error)(str(error))))
