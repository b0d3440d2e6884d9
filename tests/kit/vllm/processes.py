"""Runs this package's programs in forks of a process that has already imported vLLM."""

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
"""Seconds within which the ranks must start and run all phases."""
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
    """Environment variables in addition to `ENVIRONMENT` and this process's environment."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of programs that ran at the same time: which failed, and their output."""

    failed: Sequence[int]
    """Indices of the programs that failed by themselves or had not finished at the timeout. After a
    failure the other programs are killed; they are not listed."""
    output: str

    def check(self) -> None:
        """Raise `AssertionError` with the end of the output if a program failed."""
        assert not self.failed, f"{self.failed} failed:\n{self.output[-6000:]}"


def run_together(programs: Sequence[Program], folder: Path, *, within_s: float = START_S) -> Ended:
    """Run programs in a folder; if one fails, kill all others, as torchrun does."""
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


def last_line_of(module: str, folder: Path, *arguments: object) -> str:
    """Run a program in a folder; return the last line of its output."""
    ended = run_together([Program(module, arguments)], folder)
    ended.check()
    return ended.output.splitlines()[-1]


def environment() -> dict[str, str]:
    """Return `ENVIRONMENT`, with this process's PYTHONPATH extended by this checkout."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**ENVIRONMENT, "PYTHONPATH": paths}


def run(handle: int) -> None:
    """Run a program in this fork; its module and arguments arrive over the connection."""
    # Use a copy of the handle. The `with` block closes only the copy: if the connection itself were
    # closed, the parent would kill this program.
    with Connection(os.dup(handle)) as connection:
        module, arguments = connection.recv()
        # Make vLLM fork its CPU workers, because a spawned worker imports all modules again.
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
