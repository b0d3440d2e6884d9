"""Points in several processes side by side, as each is a replica of its own and bound by one core."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self, cast

from ...errors import LockstepError
from .evaluation import Evaluation
from .settings import PlanSettings, Point, Size

_HERE_AT_MOST_TOKENS = 4_000_000
"""So few tokens take less time than it takes to start processes."""


class Workers:
    """As many processes as there are cores, and no more than points at a time; a context manager.

    A short trace is evaluated here.
    """

    def __init__(self, settings: PlanSettings, here: Evaluation, points_max: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self.count = 1 if here.tokens < _HERE_AT_MOST_TOKENS else max(1, min(cores, points_max))
        self._settings, self._here = settings, here
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        if self.count > 1:
            self._processes = [self._start() for _ in range(self.count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def evaluate(
        self, sizes: Sequence[Size], on_point: Callable[[], None] = lambda: None
    ) -> list[Point]:
        """Return the points of all sizes, in their order; `on_point` is called after each."""
        if not self._processes:
            return list(self._one_after_the_other(sizes, on_point))
        todo: SimpleQueue[tuple[int, Size]] = SimpleQueue()
        for job in enumerate(sizes):
            todo.put(job)
        found: SimpleQueue[tuple[int, Point] | None] = SimpleQueue()
        for process in self._processes:
            Thread(target=_serve, args=(process, todo, found), daemon=True).start()
        points: dict[int, Point] = {}
        while len(points) < len(sizes):
            told = found.get()
            if told is None:
                raise LockstepError("a process that tries sizes has ended before its time")
            points[told[0]] = told[1]
            on_point()
        return [points[at] for at in range(len(sizes))]

    def _one_after_the_other(
        self, sizes: Sequence[Size], on_point: Callable[[], None]
    ) -> Iterable[Point]:
        for size in sizes:
            yield self._here.evaluate(size)
            on_point()

    def _start(self) -> subprocess.Popen[str]:
        name = __name__.rpartition(".")[0] + ".worker"
        process = subprocess.Popen(
            [sys.executable, "-m", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(f"{json.dumps(asdict(self._settings))}\n")
        process.stdin.flush()
        return process


def _serve(
    process: "subprocess.Popen[str]",
    todo: "SimpleQueue[tuple[int, Size]]",
    found: "SimpleQueue[tuple[int, Point] | None]",
) -> None:
    """Hand one size after the other to a process, until there are no more."""
    assert process.stdin is not None
    assert process.stdout is not None
    while True:
        try:
            at, size = todo.get_nowait()
        except Empty:
            return
        try:
            process.stdin.write(f"{json.dumps(asdict(size))}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        if not line:
            found.put(None)
            return
        found.put((at, cast("Point", json.loads(line))))
