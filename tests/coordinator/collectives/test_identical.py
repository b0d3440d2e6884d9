"""Every transport gives the identical vector, bit for bit, however the ranks are delayed."""

import random
import time
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest

from lockstep.coordinator.collective import Collective, PendingRound, Vector
from lockstep.coordinator.collectives.torch_gloo import GATHERED_BYTES_MAX, TorchCollective
from tests.kit.collectives.contract import LANES, PATIENCE_S, Hold, random_lanes
from tests.kit.ranks.as_processes import (
    Member,
    RanksAsProcesses,
    begin_torch,
    over_hosts,
    over_shared_memory,
)

pytestmark = pytest.mark.distributed

SEED = 93

SPIN_S_MAX = 0.0003
"""The longest delay of a rank, which is as long as many rounds."""

WRONG_MAX = 5
"""How many wrong rounds are told of."""

Make = Callable[[int], dict[str, Collective]]
"""Makes the transports for vectors of a length, by name."""


def with_all_transports(member: Member) -> Make:
    begin_torch(member)
    return _all_transports


def _all_transports(lanes: int) -> dict[str, Collective]:
    group, below, beside = (TorchCollective.create(timeout_s=PATIENCE_S) for _ in range(3))
    return {
        "torch": group,
        "shm": over_shared_memory(below, lanes),
        "hierarchical": over_hosts(2, beside, lanes),
    }


class Course:
    """The rounds of one rank: what all ranks draw alike, and how long this one is delayed."""

    def __init__(self, seed: int, rank: int, world_size: int, lanes: int) -> None:
        self._drawn = np.random.default_rng([seed, world_size, lanes])
        self._delays = random.Random(f"{seed} {rank} {world_size} {lanes}")
        self._rank, self._world_size, self._lanes = rank, world_size, lanes
        self._pending: dict[str, tuple[PendingRound, Vector, int]] = {}
        self.wrong: list[str] = []

    def run(self, transports: dict[str, Collective], rounds: int) -> None:
        for number in range(rounds):
            vectors = [random_lanes(self._drawn, self._lanes) for _ in range(self._world_size)]
            expected = reduce(np.minimum, vectors)
            pipelined = self._drawn.random() < 0.5
            for name, collective in transports.items():
                self._finish(name)
                self._delay()
                launched = collective.launch(vectors[self._rank].copy())
                self._pending[name] = launched, expected, number
                if not pipelined:
                    self._finish(name)
        for name in transports:
            self._finish(name)

    def _finish(self, name: str) -> None:
        if name not in self._pending:
            return
        pending, expected, number = self._pending.pop(name)
        self._delay()
        folded = pending.wait(PATIENCE_S)
        if folded.dtype != np.int64 or folded.tobytes() != expected.tobytes():
            self.wrong.append(f"{name}, round {number}: {folded!r} in place of {expected!r}")

    def _delay(self) -> None:
        """Keep the processor for a while, in one round out of four."""
        if self._delays.random() < 0.25:
            until = time.perf_counter() + self._delays.uniform(0, SPIN_S_MAX)
            while time.perf_counter() < until:
                pass


def run_courses(
    rounds_by_lanes: dict[int, int], make: Make, hold: Hold
) -> tuple[list[str], dict[str, float]]:
    """Return what was wrong, and the rounds of each transport in a second, by length."""
    wrong: list[str] = []
    speeds: dict[str, float] = {}
    for lanes, rounds in rounds_by_lanes.items():
        transports = make(lanes)
        first = transports["torch"]
        course = Course(SEED, first.rank, first.world_size, lanes)
        started = time.monotonic()
        course.run(transports, rounds)
        speeds[f"{lanes} lanes"] = round(rounds / (time.monotonic() - started), 1)
        wrong += course.wrong[:WRONG_MAX]
        first.gather(b"", PATIENCE_S)
        for each in transports.values():
            each.close()
    return wrong, speeds


def hold_to(folder: Path, world_size: int, rounds_by_lanes: dict[int, int]) -> None:
    """Run the rounds on ranks of their own, and fail unless all transports gave the minimum."""
    ranks = RanksAsProcesses(folder, join=with_all_transports)
    told = ranks.run(partial(run_courses, rounds_by_lanes), world_size)
    print(f"{world_size} ranks, rounds of all three in a second: {told[0][1]}")  # noqa: T201
    for rank, (wrong, _) in enumerate(told):
        assert not wrong, f"seed {SEED}, rank {rank} of {world_size}: " + "\n".join(wrong)


ABOVE_GATHERED = GATHERED_BYTES_MAX // 8 + 1
"""Lanes that torch reduces on the way in place of gathering them."""


def test_all_transports_give_the_identical_vector_of_any_length(tmp_path: Path) -> None:
    """Section 7: torch is the reference, and every other gives what it gives.

    Of an odd number of lanes, of many pages, and of so many that torch goes another way.
    """
    hold_to(tmp_path, 2, {LANES: 100, 1: 50, 25: 50, 6157: 50, ABOVE_GATHERED: 10})


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rounds"), [(2, 20_000), (4, 2_000), (8, 2_000)])
def test_all_transports_give_the_identical_vector_in_thousands_of_rounds(
    world_size: int, rounds: int, tmp_path: Path
) -> None:
    """Rule R10: the ranks get on, also where there are several for each processor."""
    hold_to(tmp_path, world_size, {LANES: rounds})
