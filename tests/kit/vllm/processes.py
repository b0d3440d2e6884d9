"""Runs programs of this kit in processes forked from one that has imported vLLM."""

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lockstep.benchmarks.vllm_overhead import ENVIRONMENT
from tests.kit.forks.processes import Nursery, Place, end_group
from tests.kit.source_tree import ROOT

START_S = 180.0
"""Timeout in seconds, longer than a start and its phases ever take here."""
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "tests.kit.vllm.rank",
    "lockstep.integrations.vllm.connector",
)


@dataclass(frozen=True, slots=True)
class Program:
    """A module with a `main` function, and its command-line arguments."""

    module: str
    arguments: Sequence[object] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables in addition to `ENVIRONMENT` and this process's environment."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of programs that ran together."""

    failed: Sequence[int]
    """Numbers of the programs that failed first or did not end in time."""
    said: str

    def check(self) -> None:
        """Raise `AssertionError` with the output if a program failed."""
        assert not self.failed, f"{self.failed} failed:\n{self.said[-6000:]}"


def run_together(programs: Sequence[Program], folder: Path, *, within_s: float = START_S) -> Ended:
    """Run programs in a folder; kill all as soon as one has failed, as torchrun does."""
    logs = [folder / f"log{number}" for number in range(len(programs))]
    leaders: list[int] = []
    running: dict[Connection, int] = {}
    failed: list[int] = []
    ends = time.monotonic() + within_s
    try:
        for number, program in enumerate(programs):
            place = Place(
                folder=folder,
                log=logs[number],
                environment={**os.environ, **environment(), **program.environment},
            )
            leader, connection = _nursery().start(f"{__name__}:run", place)
            leaders.append(leader)
            running[connection] = number
            connection.send((program.module, [*map(str, program.arguments)]))
        while running and not failed:
            ready = {*wait([*running], max(0.0, ends - time.monotonic()))}
            ended = [each for each in running if each in ready] or [*running]
            failed = [running[each] for each in ended if not _is_done(each)]
            for each in ended:
                del running[each]
                each.close()
    finally:
        for each in running:
            each.close()
        for leader in leaders:
            end_group(leader)
    return Ended(failed, "".join(each.read_text(errors="replace") for each in logs))


def said_by(module: str, folder: Path, *arguments: object) -> str:
    """Run a program in a folder; return the last line of its output."""
    ended = run_together([Program(module, arguments)], folder)
    ended.check()
    return ended.said.splitlines()[-1]


def environment() -> dict[str, str]:
    """Return `ENVIRONMENT` with a PYTHONPATH for the tests and this process's imports."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**ENVIRONMENT, "PYTHONPATH": paths}


def run(handle: int) -> None:
    """Run the program named through the connection, in a forked process."""
    # Duplicate the handle, because the parent kills every program once the connection closes. The
    # original stays open until this process exits.
    with Connection(os.dup(handle)) as connection:
        module, arguments = connection.recv()
        # On CPUs vLLM spawns its workers, and each would import all modules again.
        executor: Any = import_module("vllm.v1.executor.multiproc_executor")
        executor.get_mp_context = multiprocessing.get_context
        sys.argv = [module, *arguments]
        import_module(module).main()
        connection.send(None)


def _is_done(connection: Connection) -> bool:
    """Return whether the program has reported that it finished."""
    try:
        return connection.poll() and connection.recv() is None
    except (EOFError, ConnectionResetError):
        return False


@cache
def _nursery() -> Nursery:
    return Nursery(IMPORTED, environment())
