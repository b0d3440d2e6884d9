"""Ranks that are processes of their own, joined by a gloo group, and by what a test puts on it."""

import multiprocessing
import traceback
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from collective_contract import LANES, PATIENCE_S, Program

_processes = multiprocessing.get_context("forkserver")
# Imported once, not by every rank: they take longer than most programs.
_processes.set_forkserver_preload(
    ["torch.distributed", "pytest", "lockstep.coordinator.collectives.torch_gloo"]
)


Build = Callable[[Any], Any]
"""Makes the transport that a program gets of the torch transport of all ranks."""


class RanksAsProcesses:
    """Each rank is a process. No process is left behind, whatever a test does."""

    def __init__(self, folder: Path, build: Build | None = None) -> None:
        """`build` makes the transport; by default it is torch's."""
        self._folder = folder
        self._groups = 0
        self._build = build or as_it_is

    def run(self, program: Program, world_size: int, *, late: Collection[int] = ()) -> list[Any]:
        """See `collective_contract.Ranks`."""
        with self.start(program, world_size) as group:
            results = {rank: group.result(rank) for rank in range(world_size) if rank not in late}
            group.release()
            results |= {rank: group.result(rank) for rank in late}
        return [results[rank] for rank in range(world_size)]

    def start(self, program: Program, world_size: int) -> "RunningGroup":
        """Start the program on every rank of a new group, and return without waiting for it."""
        self._groups += 1
        store = self._folder / f"store-{self._groups}"
        return RunningGroup(program, world_size, store, self._build)


def as_it_is(group: Any) -> Any:
    """Use the torch transport."""
    return group


def over_shared_memory(group: Any, lanes: int = LANES) -> Any:
    """Use shared memory."""
    from lockstep.coordinator.collectives.host_group import Place
    from lockstep.coordinator.collectives.shared_memory import SharedMemoryCollective

    places = [Place.here()] * group.world_size
    return SharedMemoryCollective.create(group, places, lanes=lanes, timeout_s=PATIENCE_S)


def over_hosts(ranks_per_host: int, group: Any, lanes: int = LANES) -> Any:
    """Use shared memory between ranks that shall be taken for those of one host, and gloo beyond."""
    from lockstep.coordinator.collectives.hierarchical import HierarchicalCollective
    from lockstep.coordinator.collectives.host_group import Place

    places = [Place(f"host {rank // ranks_per_host}", "all") for rank in range(group.world_size)]
    return HierarchicalCollective.create(group, places, lanes=lanes, timeout_s=PATIENCE_S)


BUILDS: dict[str, Build] = {
    "torch": as_it_is,
    "shm": over_shared_memory,
    "hierarchical": partial(over_hosts, 2),
}
"""The transports by name; the hierarchical one with two ranks to a host."""


class Seat(NamedTuple):
    """Which rank a process is, and where the ranks meet."""

    rank: int
    world_size: int
    store: str


class RunningGroup:
    """The processes of one group. Leaving the `with` block kills those that still run."""

    def __init__(self, program: Program, world_size: int, store: Path, build: Build) -> None:
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(
                target=_run_rank,
                args=(program, build, Seat(rank, world_size, str(store)), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def result(self, rank: int) -> Any:
        """Wait for what the program of `rank` returned."""
        if not self.connections[rank].poll(2 * PATIENCE_S):
            raise AssertionError(f"rank {rank} did not return")
        try:
            error, result = self.connections[rank].recv()
        except EOFError:
            raise AssertionError(f"rank {rank} died before it returned") from None
        if error is not None:
            raise AssertionError(f"rank {rank} raised:\n{error}")
        return result

    def release(self) -> None:
        """Let those go on that wait in `hold`, and the others end."""
        for connection in self.connections:
            try:
                connection.send(None)
            except BrokenPipeError:
                continue  # The rank is dead, which some tests want.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(PATIENCE_S)
        for connection in self.connections:
            connection.close()


def _run_rank(program: Program, build: Build, seat: Seat, connection: Connection) -> None:
    released = False

    def hold() -> None:
        nonlocal released
        if not released:
            connection.recv()
        released = True

    try:
        connection.send((None, program(build(_join(seat)), hold)))
    except BaseException:
        connection.send((traceback.format_exc(), None))
        raise
    hold()


def _join(seat: Seat) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from lockstep.coordinator.collectives.torch_gloo import TorchCollective

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{seat.store}",
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    return TorchCollective.create(timeout_s=PATIENCE_S)
