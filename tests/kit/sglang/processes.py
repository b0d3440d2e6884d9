"""How a driver comes to be: forked from a process that has imported SGLang, or started on its own.

To import SGLang takes longer than all else that a test does with it, and every rank would do it again.
So one process for each process of tests imports it once, and is there until that ends.
"""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

import psutil

from tests.kit.servers.processes import until
from tests.kit.source_tree import ROOT

IMPORT_S = 150.0
KIT = Path(__file__).parent
ON_THE_PATH = (KIT / "stand_ins", KIT / "plugins", ROOT, ROOT / "src")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a driver runs."""

    folder: Path
    log: Path
    environment: Mapping[str, str]


class CannotStartError(Exception):
    """The process that imports SGLang for the others did not come so far."""


class Nursery:
    """A process that has imported SGLang, and forks drivers."""

    def __init__(self) -> None:
        self._connection, there = Pipe()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.sglang.nursery", str(there.fileno())],
                pass_fds=[there.fileno()],
                env={**os.environ, **environment(2, ())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.close)

    def start(self, place: Place, connection: Connection) -> int:
        """Fork a driver that speaks through `connection`; return its process, which leads a group."""
        self._connection.send((str(place.folder), str(place.log), dict(place.environment)))
        send_handle(self._connection, connection.fileno(), self._process.pid)
        if not self._connection.poll(IMPORT_S):
            raise CannotStartError(f"SGLang was not imported in {IMPORT_S:g} s")
        failed, pid = self._connection.recv()
        if failed:
            raise CannotStartError(f"SGLang cannot be imported:\n{failed}")
        return int(pid)

    def close(self) -> None:
        """Let it end."""
        self._connection.close()
        self._process.wait()


def start_forked(place: Place) -> tuple[int, Connection]:
    """Start a driver, of which also the ranks are forked; return it and what to speak through."""
    return _with_a_pipe(lambda there: _nursery().start(place, there))


def start_fresh(place: Place) -> tuple[int, Connection]:
    """Start a driver of which each process imports SGLang, as whoever serves with it does."""

    def start(there: Connection) -> int:
        with place.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.sglang.driver", str(there.fileno())],
                pass_fds=[there.fileno()],
                cwd=place.folder,
                env=place.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Whoever ends it waits for it by its number.
        process.returncode = 0
        return process.pid

    return _with_a_pipe(start)


def end_group(leader: int) -> None:
    """End a driver and all that it has started; done when nothing of it runs."""
    # The group outlives its first process, and may be gone as a whole.
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(leader, 0)
    until(lambda: not any(_belongs(process, leader) for process in psutil.process_iter(["status"])))


def environment(tp: int, plugins: Sequence[str]) -> dict[str, str]:
    """Return what SGLang's processes need to run on a CPU, with these plug-ins."""
    paths = [*map(str, ON_THE_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_PLUGINS": ",".join(plugins) or "none",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # It would wait for five seconds before it looks at its ranks with tools that are not here.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # Two small functions would be compiled with the first request, for twenty seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Cores for each rank; without them SGLang wants a NUMA node for each.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % _cores()) for rank in range(tp)),
    }


@cache
def _nursery() -> Nursery:
    return Nursery()


def _belongs(process: psutil.Process, leader: int) -> bool:
    """Whether a process is one of the group and not merely waits for whoever asks how it ended."""
    try:
        return os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return False


def _cores() -> int:
    return os.cpu_count() or 1


def _with_a_pipe(start: Callable[[Connection], int]) -> tuple[int, Connection]:
    here, there = Pipe()
    try:
        with there:
            return start(there), here
    except BaseException:
        here.close()
        raise
