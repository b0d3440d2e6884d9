"""Processes that evaluate cache sizes in parallel, because each evaluation uses only one core."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Self

from ...errors import LockstepError
from ..cli.interruption import work_for
from .evaluation import Evaluation
from .plan_settings import PlanPoint, PlanSettings, Size

_HERE_AT_MOST_TOKENS = 4_000_000
"""Traces with fewer tokens are evaluated in this process, because starting processes takes longer."""
_OF_THIS_PROCESS: list[Evaluation] = []


class Workers:
    """Evaluates cache sizes in parallel, with one process per core but at most one per size.

    Use as a context manager. A short trace is evaluated in this process, without other processes.
    """

    def __init__(self, settings: PlanSettings, here: Evaluation, points_max: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self.count = 1 if here.tokens < _HERE_AT_MOST_TOKENS else max(1, min(cores, points_max))
        self._here = here
        self._processes: ProcessPoolExecutor | None = None
        if self.count > 1:
            # Spawn instead of fork, because a fork copies locks that other threads hold; nothing would
            # release the copies.
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

    def evaluate(self, sizes: Sequence[Size]) -> Iterator[PlanPoint]:
        """Yield one result per size, in the same order as `sizes`."""
        if self._processes is None:
            yield from map(self._here.evaluate, sizes)
            return
        try:
            yield from self._processes.map(_evaluate, sizes)
        except BrokenProcessPool as error:
            raise LockstepError("a process that evaluates sizes was killed") from error


def _begin(settings: PlanSettings, launcher: int) -> None:
    work_for(launcher)
    _OF_THIS_PROCESS.append(Evaluation(settings))


def _evaluate(size: Size) -> PlanPoint:
    return _OF_THIS_PROCESS[0].evaluate(size)
