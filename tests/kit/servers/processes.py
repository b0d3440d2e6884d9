"""Waits for a condition on another process, and stops processes with SIGSTOP."""

import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until `condition()` is true; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def stopped_process(pid: int) -> Generator[None]:
    """Stop a process with SIGSTOP, and wait until all of its threads have stopped.

    The wait is necessary because some threads may run for a short time after the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        tasks = Path(f"/proc/{pid}/task")
        until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
