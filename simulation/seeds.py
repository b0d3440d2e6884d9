"""Running the schedules of many seeds, over a few processes."""

import logging
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

from .result import Violation


class Result(Protocol):
    """What a schedule has come to."""

    @property
    def violation(self) -> Violation | None:
        """What it has found, if anything."""
        ...


ResultT = TypeVar("ResultT", bound=Result)

_ALONE = 8
"""For so few schedules it is not worth starting processes."""


@contextmanager
def quiet_log() -> Generator[None]:
    """Keep warnings about simulated faults out of the log."""
    log = logging.getLogger("lockstep")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def run_all(
    run: Callable[[int], ResultT], seeds: range, processes: int, *, until_found: bool = False
) -> Iterator[ResultT]:
    """Yield results in the order of the seeds; `until_found` up to the first with a violation."""
    # Most bugs that are looked for show in the first few.
    alone = len(seeds) if processes <= 1 or len(seeds) < _ALONE else _ALONE * until_found
    for seed in seeds[:alone]:
        result = run(seed)
        yield result
        if until_found and result.violation is not None:
            return
    rest = seeds[alone:]
    if not rest:
        return
    chunk = 4 if until_found else max(1, min(16, len(rest) // (4 * processes)))
    with ProcessPoolExecutor(processes) as pool:
        for result in pool.map(run, rest, chunksize=chunk):
            yield result
            if until_found and result.violation is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return
