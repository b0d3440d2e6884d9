"""Every transport returns the bit-identical vector, whatever the ranks' delays."""

import random
import time
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
"""Longest random delay of a rank in seconds, short enough to run many rounds."""

WRONG_MAX = 5


def join(member: Member) -> Member:
    begin_torch(member)
    return member


def hold_to(folder: Path, world_size: int, rounds_by_lanes: dict[int, int]) -> None:
    """Run the rounds on new ranks; fail unless every transport returned the minimum."""
    wrong_by_rank = RanksAsProcesses(folder, join=join).run(
        partial(run_all, rounds_by_lanes), world_size
    )
    for rank, wrong in enumerate(wrong_by_rank):
        assert not wrong, f"seed {SEED}, rank {rank} of {world_size}: " + "\n".join(wrong)


def run_all(rounds_by_lanes: dict[int, int], member: Member, hold: Hold) -> list[str]:
    """Run rounds of each vector length; return a line for each wrong result."""
    wrong: list[str] = []
    for lanes, rounds in rounds_by_lanes.items():
        group, below, beside = (TorchCollective.create(timeout_s=PATIENCE_S) for _ in range(3))
        transports: dict[str, Collective] = {
            "torch": group,
            "shm": over_shared_memory(below, lanes),
            "hierarchical": over_hosts(2, beside, lanes),
        }
        wrong += run_rounds(transports, lanes, rounds)[:WRONG_MAX]
        group.gather(b"", PATIENCE_S)
        for each in transports.values():
            each.close()
    return wrong


def run_rounds(transports: dict[str, Collective], lanes: int, rounds: int) -> list[str]:
    """Run the same rounds over all transports; return a line for each wrong result.

    Half of the rounds stay pending until the next round. Each rank draws random delays from its own
    seed.
    """
    rank, world_size = transports["torch"].rank, transports["torch"].world_size
    drawn = np.random.default_rng([SEED, world_size, lanes])
    delays = random.Random(f"{SEED} {rank} {world_size} {lanes}")
    pending: dict[str, tuple[PendingRound, Vector, int]] = {}
    wrong: list[str] = []

    def finish(name: str) -> None:
        if name in pending:
            launched, expected, number = pending.pop(name)
            delay(delays)
            folded = launched.wait(PATIENCE_S)
            if folded.dtype != np.int64 or folded.tobytes() != expected.tobytes():
                wrong.append(f"{name}, round {number}: {folded!r} in place of {expected!r}")

    for number in range(rounds):
        vectors = [random_lanes(drawn, lanes) for _ in range(world_size)]
        expected = reduce(np.minimum, vectors)
        pipelined = drawn.random() < 0.5
        for name, collective in transports.items():
            finish(name)
            delay(delays)
            pending[name] = collective.launch(vectors[rank].copy()), expected, number
            if not pipelined:
                finish(name)
    for name in transports:
        finish(name)
    return wrong


def delay(delays: random.Random) -> None:
    """With a probability of one in four, busy-wait for a random time."""
    if delays.random() < 0.25:
        until = time.perf_counter() + delays.uniform(0, SPIN_S_MAX)
        while time.perf_counter() < until:
            pass


ABOVE_GATHERED = GATHERED_BYTES_MAX // 8 + 1
"""The shortest vector length for which the torch transport reduces instead of gathering."""


def test_all_transports_give_the_identical_vector_of_any_length(tmp_path: Path) -> None:
    """Section 7: torch is the reference, and every other transport returns the same vector.

    The lengths include odd ones, one of many memory pages, and one above torch's limit for gathering.
    """
    hold_to(tmp_path, 2, {LANES: 100, 1: 50, 25: 50, 6157: 50, ABOVE_GATHERED: 10})


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rounds"), [(2, 20_000), (4, 2_000), (8, 2_000)])
def test_all_transports_give_the_identical_vector_in_thousands_of_rounds(
    world_size: int, rounds: int, tmp_path: Path
) -> None:
    """Rule R10: all rounds complete with equal results, even if several ranks share a processor."""
    hold_to(tmp_path, world_size, {LANES: rounds})
