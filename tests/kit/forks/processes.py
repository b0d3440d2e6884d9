"""Forks processes from a parent that has imported an engine, and kills them with all their children."""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

import psutil

from tests.kit.servers.processes import until

IMPORT_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The working folder, log file and environment variables of a forked process."""

    folder: Path
    log: Path
    environment: Mapping[str, str]


class CannotStartError(Exception):
    """Raised if the parent of the forks cannot import its modules in time."""


class Nursery:
    """A parent process that imports an engine's modules once and then forks on request."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules = modules
        self._connection, there = Pipe()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.forks.nursery", str(there.fileno()), *modules],
                pass_fds=[there.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.close)

    def start(self, called: str, place: Place) -> tuple[int, Connection]:
        """Fork a process as leader of a new process group; return the process id and a connection.

        `called` names a function as "package.module:function". The function takes the handle of the
        fork's end of the connection.
        """
        return with_a_pipe(lambda there: self._start(called, place, there))

    def _start(self, called: str, place: Place, there: Connection) -> int:
        request = (called, str(place.folder), str(place.log), dict(place.environment))
        self._connection.send(request)
        send_handle(self._connection, there.fileno(), self._process.pid)
        if not self._connection.poll(IMPORT_S):
            raise CannotStartError(f"{self._modules} were not imported in {IMPORT_S:g} s")
        failed, pid = self._connection.recv()
        if failed:
            raise CannotStartError(f"{self._modules} cannot be imported:\n{failed}")
        return int(pid)

    def close(self) -> None:
        """Close the connection, so that the parent of the forks exits, and wait for its exit."""
        self._connection.close()
        self._process.wait()


def with_a_pipe(start: Callable[[Connection], int]) -> tuple[int, Connection]:
    """Start a process with one end of a new pipe; return the process id and the pipe's other end."""
    here, there = Pipe()
    try:
        with there:
            return start(there), here
    except BaseException:
        here.close()
        raise


def end_group(leader: int) -> None:
    """Kill a process group, and return when none of its processes runs."""
    # Ignore `ProcessLookupError`, because all processes of the group may already have exited.
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(leader, 0)
    until(lambda: not any(_belongs(process, leader) for process in psutil.process_iter(["status"])))


def _belongs(process: psutil.Process, leader: int) -> bool:
    try:
        return os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return False
