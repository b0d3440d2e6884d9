"""Runs simulated schedules of deliberately broken code, and asserts that at least one of them fails."""

from collections.abc import Iterator

import pytest

from lockstep.simulation.rank.conditions import Conditions
from lockstep.simulation.rank.epoch import SOUND_BUILD, Build, make_executor
from lockstep.simulation.rank.executor import SimulatedExecutor
from lockstep.simulation.rank.memory import SimulatedStore, SymbolicMemory
from lockstep.simulation.schedule import run_schedule
from lockstep.simulation.world.models import LLAMA
from lockstep.simulation.world.world import REPLICA

SEEDS_MAX = 60


def seeds_from(first: int, among: int = SEEDS_MAX) -> pytest.MarkDecorator:
    """Parametrize a test with a range of `among` seeds that begins with `first`.

    Each test chooses a `first` with which its bug is found, because low seeds may not reveal the bug.
    """
    return pytest.mark.parametrize(
        "seeds", [pytest.param(range(first, first + among), id=f"from {first}")]
    )


def violations(
    build: Build = SOUND_BUILD,
    *,
    profile: str = LLAMA,
    faults: str = "mixed",
    l1: str = REPLICA,
    seeds: range = range(SEEDS_MAX),
) -> Iterator[str]:
    """Run one simulated schedule per seed; yield the violation of each schedule that has one."""
    for seed in seeds:
        violation = run_schedule(
            seed, profile=profile, faults=faults, depth=seed % 2, l1=l1, build=build
        ).violation
        if violation is not None:
            yield violation.finding


def making(kind: type[SimulatedExecutor], *, every_rank: bool = False) -> Build:
    """Return a factory of executors, which are of the faulty class `kind` on every rank except rank 0.

    If `every_rank` is True, the executor of rank 0 is faulty, too.
    """

    def make(
        conditions: Conditions, memory: SymbolicMemory, store: SimulatedStore
    ) -> SimulatedExecutor:
        broken = conditions.rank or every_rank
        used = kind if broken else SimulatedExecutor
        return make_executor(conditions, memory, store, kind=used)

    return Build(make=make)


def assert_found(found: Iterator[str], *words: str) -> None:
    """Assert that at least one violation contains one of `words`."""
    seen: list[str] = []
    for finding in found:
        seen.append(finding)
        if any(word in seen[-1] for word in words):
            return
    pytest.fail(f"no violation of any schedule names {words}; those that were found: {seen}")
