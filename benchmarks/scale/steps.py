"""What the parts of a step cost one rank, measured alone, by the sizes that they depend on.

One process writes the cells of as many ranks as it likes: what a rank does with them does not need
those ranks. Everything is measured twice: in a tight loop, where all of it is in the core's own caches;
and after something else has filled those, as a model's forward pass does between two rounds.
"""

import gc
import mmap
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from ...coordinator.ballot import Ballot
from ...coordinator.collectives.cells import Cells
from ...coordinator.collectives.futex import Futex
from ...coordinator.fold import fold
from ...coordinator.lanes import BallotShape, LaneLayout, Voter
from ...coordinator.seats import Seats
from ...simulation.crowd import CrowdRounds, CrowdSettings, compute, new_replica, prefetch

ROWS = (1, 2, 4, 16, 64, 256)
LANES = (27, 120, 792, 6_168, 30_024)
"""Vectors for 1, 32, 256, 2,048 and 10,000 seats."""

CALLS_MIN, CALLS_MAX, BUDGET_S = 15, 400, 0.15
"""How often one thing is timed: for so long, but not less nor more often than this."""

OTHER_BYTES = 32 << 20
"""What is read and written between two calls to fill a core's caches: more than two levels hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One thing at one size; the median in microseconds."""

    rows: int = 1
    lanes: int
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSample:
    """Says what one round of a crowd cost its replica, in microseconds."""

    lanes: int
    changes: int
    pages: int
    """The pages of each operation."""
    verdict_us: float
    apply_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes that Python and numpy allocate for what is in flight, as `tracemalloc` counts them."""

    operations: int
    pages: int
    replica_bytes: int
    """What a replica keeps, less one with nothing in flight; nodes that are copied count."""
    ballot_bytes: int
    """What a ballot keeps, less its lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Says what a rank does with its own vector, and with the cells of others."""

    write: list[StepSample]
    read: list[StepSample]
    fold: list[StepSample]
    fill: list[StepSample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Everything that is measured in one process."""

    warm: StepParts
    cold: StepParts
    rounds: list[RoundSample]
    note_us: float
    memory: list[MemorySample]


def measure_steps(progress: Callable[[str], None], *, rows_max: int = ROWS[-1]) -> Steps:
    """Measure all parts; takes about a minute. `rows_max` leaves out what is larger."""
    parts = [_parts(progress, rows_max, _Clock(cold=cold)) for cold in (False, True)]
    rounds: list[RoundSample] = []
    notes_us: list[float] = []
    for operations in (32, 256, 2048):
        for pages in (1, 16):
            progress(f"a replica with {operations} operations of {pages} pages")
            ended, note_us = _rounds(operations, pages)
            rounds += ended
            notes_us.append(note_us)
    progress("memory")
    return Steps(
        warm=parts[0],
        cold=parts[1],
        rounds=rounds,
        note_us=statistics.median(notes_us),
        memory=[_memory(operations, pages) for operations in (256, 2048) for pages in (1, 16)],
    )


def _parts(progress: Callable[[str], None], rows_max: int, clock: "_Clock") -> StepParts:
    parts = StepParts(write=[], read=[], fold=[], fill=[])
    for lanes in LANES:
        progress(f"cells and ballots of {lanes} lanes")
        parts.fill.append(StepSample(lanes=lanes, us=clock.median_us(_filling(lanes))))
        lane = np.arange(lanes, dtype=np.int64)
        one = _cells(1, lanes)
        parts.write.append(
            StepSample(lanes=lanes, us=clock.median_us(partial(one.write, 0, 2, lane)))
        )
        for rows in (each for each in ROWS if each <= rows_max):
            reading = partial(_cells(rows, lanes).span(0, rows).read, 2)
            given = reading()
            assert given is not None
            parts.read.append(StepSample(rows=rows, lanes=lanes, us=clock.median_us(reading)))
            us = clock.median_us(partial(fold, given))
            parts.fold.append(StepSample(rows=rows, lanes=lanes, us=us))
    return parts


def _cells(rows: int, lanes: int) -> Cells:
    """Return cells in which all writers have written round 2."""
    cells = Cells(mmap.mmap(-1, Cells.size(rows, lanes)), rows, lanes, Futex())
    for writer in range(rows):
        cells.write(writer, 2, np.arange(lanes, dtype=np.int64) + writer)
    return cells


def _filling(lanes: int) -> Callable[[], object]:
    seats = (lanes - BallotShape(world_size=2, seats=0).length) // 3
    ballot = Ballot(BallotShape(world_size=2, seats=seats), 0)
    layout = LaneLayout(epoch=1, round=1, state_digest=1, seats=Seats(seats).freeze())
    return partial(ballot.fill, layout, Voter(healthy=True, time_ms=1))


def _rounds(operations: int, pages: int) -> tuple[list[RoundSample], float]:
    settings = CrowdSettings(ranks=2, hosts=1, operations=operations, pages=pages)
    gc.disable()
    try:
        crowd = CrowdRounds(settings, time.perf_counter)
        crowd.run()
    finally:
        gc.enable()
    samples = crowd.samples
    ended = [
        RoundSample(
            lanes=crowd.shape.length,
            changes=changes,
            pages=pages,
            verdict_us=verdict_s * 1e6,
            apply_us=apply_s * 1e6,
        )
        for changes, verdict_s, apply_s in zip(
            samples.changes, samples.verdict_s, samples.apply_s, strict=True
        )
    ]
    return ended, statistics.median(samples.note_s) * 1e6


def _memory(operations: int, pages: int) -> MemorySample:
    settings = CrowdSettings(ranks=1, hosts=1, operations=operations, pages=pages)
    shape = BallotShape(world_size=1, seats=settings.seats)
    alone, without_ballot = _allocated(settings, None)
    _, with_ballot = _allocated(settings, Ballot(shape, 0))
    lanes_bytes = 8 * shape.length
    return MemorySample(
        operations=operations,
        pages=pages,
        replica_bytes=without_ballot - alone,
        ballot_bytes=with_ballot - without_ballot - lanes_bytes,
    )


def _allocated(settings: CrowdSettings, ballot: Ballot | None) -> tuple[int, int]:
    """Return the bytes of a replica and of its ballots: at first, and with all in flight."""
    gc.collect()
    tracemalloc.start()
    try:
        replica = new_replica(settings)
        gc.collect()
        empty, _ = tracemalloc.get_traced_memory()
        copies = settings.backups + settings.persists
        commands = compute(replica, settings, range(copies))
        more = prefetch(replica, settings, range(copies, copies + settings.prefetches))
        for effects in chain(commands, more):
            if ballot is not None:
                ballot.follow(effects.expectations)
        gc.collect()
        full, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return empty, full


class _Clock:
    """Times one thing many times, with or without something else in between."""

    def __init__(self, *, cold: bool) -> None:
        self._other = np.zeros(OTHER_BYTES // 8 if cold else 0, dtype=np.int64)

    def median_us(self, thing: Callable[[], object]) -> float:
        """Return the median over as many calls as there is time for, in microseconds."""
        thing()
        samples: list[float] = []
        ends = time.perf_counter() + BUDGET_S
        while len(samples) < CALLS_MAX and (len(samples) < CALLS_MIN or time.perf_counter() < ends):
            self._other += 1
            began = time.perf_counter()
            thing()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples) * 1e6
