"""Points in several processes side by side, as each is a replica of its own and bound by one core."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Self

from ...errors import LockstepError
from ..cli.interruption import end_on_signals, end_with
from .evaluation import Evaluation
from .settings import PlanSettings, Point, Size

_HERE_AT_MOST_TOKENS = 4_000_000
"""So few tokens take less time than it takes to start processes."""
_OF_THIS_PROCESS: list[Evaluation] = []


class Workers:
    """As many processes as there are cores, and no more than points at a time; a context manager.

    A short trace is evaluated here.
    """

    def __init__(self, settings: PlanSettings, here: Evaluation, points_max: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self.count = 1 if here.tokens < _HERE_AT_MOST_TOKENS else max(1, min(cores, points_max))
        self._here = here
        self._processes: ProcessPoolExecutor | None = None
        if self.count > 1:
            # Threads of this process may hold locks, which a fork would never see released.
            self._processes = ProcessPoolExecutor(
                self.count, get_context("spawn"), _begin, (settings, os.getpid())
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._processes is not None:
            for each in active_children():
                each.kill()
            self._processes.shutdown(cancel_futures=True)

    def evaluate(
        self, sizes: Sequence[Size], on_point: Callable[[], None] = lambda: None
    ) -> list[Point]:
        """Return the points of all sizes, in their order; `on_point` is called after each."""
        points: list[Point] = []
        side_by_side = self._processes
        try:
            for point in (
                map(self._here.evaluate, sizes)
                if side_by_side is None
                else side_by_side.map(_evaluate, sizes)
            ):
                points.append(point)
                on_point()
        except BrokenProcessPool as error:
            raise LockstepError("a process that tries sizes has ended before its time") from error
        return points


def _begin(settings: PlanSettings, launcher: int) -> None:
    end_on_signals()
    end_with(launcher)
    _OF_THIS_PROCESS.append(Evaluation(settings))


def _evaluate(size: Size) -> Point:
    return _OF_THIS_PROCESS[0].evaluate(size)
