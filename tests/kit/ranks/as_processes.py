"""Runs the ranks of a group as processes. Gloo or pipes connect the processes."""

import itertools
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from lockstep.errors import CollectiveTimeout, PeerLost
from tests.kit.collectives.contract import LANES, PATIENCE_S, Hold

_processes = multiprocessing.get_context("forkserver")
# Import these modules once in the fork server, because each import takes longer than most programs.
_processes.set_forkserver_preload(
    ["torch.distributed", "pytest", "lockstep.coordinator.collectives.hierarchical"]
)


class Member(NamedTuple):
    """The rank of this process in its group, and its connections to the other ranks."""

    rank: int
    world_size: int
    store: str
    links: Sequence[Connection]
    """On rank 0, one connection to each other rank; on any other rank, one connection to rank 0."""


Join = Callable[[Member], Any]
"""Function that connects a rank with the other ranks and returns the connection."""

JoinedProgram = Callable[[Any, Hold], Any]
"""Program that runs on one rank. Its first argument is the result of `Build`."""

Build = Callable[[Any], Any]
"""Function that takes the result of `Join` and returns the transport under test."""


class RanksAsProcesses:
    """Runs each rank as a process, and kills all processes at the end of the test."""

    def __init__(self, folder: Path, build: Build | None = None, join: Join | None = None) -> None:
        """`join` connects the ranks. `build` creates the transport from the result of `join`."""
        self._folder = folder
        self._groups = itertools.count()
        self._build = build or as_it_is
        self._join = join or over_gloo

    def run(
        self, program: JoinedProgram, world_size: int, *, late: Collection[int] = ()
    ) -> list[Any]:
        """Run a program on each rank of a new group; return the results in rank order.

        Ranks in `late` may wait in `hold` until all other ranks have returned.
        """
        with self.start(program, world_size) as group:
            results = {rank: group.result(rank) for rank in range(world_size) if rank not in late}
            group.release()
            results |= {rank: group.result(rank) for rank in late}
        return [results[rank] for rank in range(world_size)]

    def start(self, program: JoinedProgram, world_size: int) -> "RunningGroup":
        store = self._folder / f"store-{next(self._groups)}"
        rank = partial(_run_rank, program, self._build, self._join)
        return RunningGroup(rank, world_size, store)


def as_it_is(group: Any) -> Any:
    return group


def over_shared_memory(group: Any, lanes: int = LANES) -> Any:
    from lockstep.coordinator.collectives.shared_memory import HostIdentity, SharedMemoryCollective

    identities = [HostIdentity.here()] * group.world_size
    return SharedMemoryCollective.create(group, identities, lanes=lanes, timeout_s=PATIENCE_S)


def over_hosts(ranks_per_host: int, group: Any, lanes: int = LANES) -> Any:
    """Make a hierarchical transport in which each host has `ranks_per_host` consecutive ranks."""
    from lockstep.coordinator.collectives.hierarchical import HierarchicalCollective
    from lockstep.coordinator.collectives.shared_memory import HostIdentity

    identities = [
        HostIdentity(f"host {rank // ranks_per_host}", "all") for rank in range(group.world_size)
    ]
    return HierarchicalCollective.create(group, identities, lanes=lanes, timeout_s=PATIENCE_S)


BUILDS: dict[str, Build] = {
    "torch": as_it_is,
    "shm": over_shared_memory,
    "hierarchical": partial(over_hosts, 2),
}
"""The transports by name. The hierarchical one has two ranks per host."""


class RunningGroup:
    """The processes of one group. Leaving the `with` block kills the processes that still run."""

    def __init__(
        self, run_rank: Callable[[Member, Connection], None], world_size: int, store: Path
    ) -> None:
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        pairs = [_processes.Pipe() for _ in range(1, world_size)]
        links = [[first for first, _ in pairs], *([other] for _, other in pairs)]
        for rank in range(world_size):
            ours, theirs = _processes.Pipe()
            member = Member(rank, world_size, str(store), links[rank])
            process = _processes.Process(target=run_rank, args=(member, theirs), daemon=True)
            process.start()
            for each in (theirs, *links[rank]):
                each.close()
            self.connections.append(ours)
            self.processes.append(process)

    def result(self, rank: int) -> Any:
        """Wait for the program of `rank` and return its result."""
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
        """Unblock the ranks that are blocked in `hold`, and let finished ranks exit."""
        for connection in self.connections:
            try:
                connection.send(None)
            except BrokenPipeError:
                continue  # The rank has exited. Some tests kill a rank on purpose.

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


def _run_rank(
    program: JoinedProgram, build: Build, join: Join, member: Member, connection: Connection
) -> None:
    # Unblock SIGINT: a rank inherits the fork server's signal mask, and benchmarks start the fork
    # server with SIGINT blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    released = False

    def hold() -> None:
        nonlocal released
        if not released:
            connection.recv()
        released = True

    try:
        connection.send((None, program(build(join(member)), hold)))
    except BaseException:
        connection.send((traceback.format_exc(), None))
        raise
    hold()


def over_gloo(member: Member) -> Any:
    from lockstep.coordinator.collectives.torch_gloo import TorchCollective

    begin_torch(member)
    return TorchCollective.create(timeout_s=PATIENCE_S)


def begin_torch(member: Member) -> None:
    """Initialise torch.distributed with gloo for this rank."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{member.store}",
        rank=member.rank,
        world_size=member.world_size,
        timeout=timedelta(seconds=PATIENCE_S),
    )


def over_pipes(member: Member) -> "Piped":
    """Return a collective over pipes, which starts much faster than gloo but only gathers."""
    return Piped(member)


class Piped:
    """A `Collective` over pipes that supports `gather` but no rounds."""

    transport = "pipes"
    launches = 0

    def __init__(self, member: Member) -> None:
        self.rank, self.world_size = member.rank, member.world_size
        self._links = member.links

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        if not self.rank:
            gathered = [payload, *(_received(link, timeout_s) for link in self._links)]
            for link in self._links:
                link.send(gathered)
            return gathered
        self._links[0].send(payload)
        everybody: list[bytes] = _received(self._links[0], timeout_s)
        return everybody

    def launch(self, lanes: Any) -> NoReturn:
        raise AssertionError("there are no rounds over pipes")

    def close(self) -> None:
        """Do nothing on close, because the next transport may use the same pipes."""


def _received(link: Connection, timeout_s: float) -> Any:
    if not link.poll(timeout_s):
        raise CollectiveTimeout(f"nothing came within {timeout_s} s")
    try:
        return link.recv()
    except (EOFError, OSError) as error:
        raise PeerLost("a rank has closed its pipe") from error
