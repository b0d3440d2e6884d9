"""Starts replays in separate processes, with the command that a user would run."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import psutil
import pytest

from lockstep.launch.replay.report import Report, read_report
from lockstep.small_engine.request import WorkloadRequest

BIN = Path(sys.executable).parent
COMMAND = (str(BIN / "lockstep"), "replay")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RANK = ("-m", "lockstep.launch.replay.replay")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray")


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the command that starts `ranks` ranks with torchrun."""
    return (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), *RANK)


@dataclass(frozen=True)
class Ended:
    """The exit status, stdout and stderr of a finished command."""

    status: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """Return the stderr lines that Lockstep itself printed."""
        return [line for line in self.err.splitlines() if line.startswith("lockstep: ")]


def run(*arguments: object, timeout_s: float = 240.0, **environment: str) -> Ended:
    done = subprocess.run(
        [str(argument) for argument in arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def replay(report: Path, *arguments: object, start: Sequence[object] = COMMAND) -> Report:
    ended = run(*start, *arguments, "--report", report)
    assert ended.status == 0, ended.err
    return read_report(report)


def write_trace(path: Path, requests: Iterable[WorkloadRequest]) -> Path:
    lines = [
        {
            "timestamp": 0,
            "input_length": request.prompt_length,
            "output_length": request.output_length,
            "hash_ids": list(request.hash_ids),
        }
        for request in requests
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


@dataclass
class Running:
    """A command that runs in a new process session, and all of its child processes seen so far."""

    process: "subprocess.Popen[str]"
    errors: IO[str]
    seen: dict[int, psutil.Process] = field(default_factory=dict[int, psutil.Process])

    def wait_until(self, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until a condition is true; fail if the command exits first."""
        deadline = time.monotonic() + timeout_s
        while not true():
            assert self.process.poll() is None, f"ended early: {self.output_so_far()}"
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.05)
            self.look()

    def look(self) -> None:
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.seen.update({child.pid: child for child in children})

    def output_so_far(self) -> str:
        """Return the command's stderr so far."""
        self.errors.seek(0)
        return self.errors.read()

    def survivors(self) -> list[str]:
        """Return the command lines of the child processes that still run."""
        return [
            " ".join(child.cmdline())[:200]
            for child in self.seen.values()
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        ]

    def survivors_after(self, timeout_s: float) -> list[str]:
        """Wait until all child processes have exited; return those that still run at the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.survivors()

    def kill(self) -> None:
        self.look()
        if self.process.poll() is None:
            self.process.kill()
        for child in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait(10)
        self.errors.close()


def start(errors: IO[str], *arguments: object, **environment: str) -> Running:
    """Start a command in a new process session, with stderr written to `errors`."""
    process = subprocess.Popen(
        [str(argument) for argument in arguments],
        stdout=subprocess.DEVNULL,
        stderr=errors,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return Running(process, errors)
