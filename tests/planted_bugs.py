"""Schedules with a bug planted in them, and the claim that one of them notices."""

from collections.abc import Iterator

import pytest

from lockstep.simulation.epoch import MakeExecutor, make_executor
from lockstep.simulation.schedule import Schedule, Tamper
from lockstep.simulation.world import REPLICA, draw_world

SEEDS_MAX = 60


def violations(
    *,
    make: MakeExecutor = make_executor,
    tamper: Tamper | None = None,
    profile: str = "mixed",
    l1: str = REPLICA,
    seeds: range = range(SEEDS_MAX),
) -> Iterator[str]:
    """Yield what the schedules of `seeds` find, whoever owns the device pages as `l1` says."""
    for seed in seeds:
        world = draw_world(seed, ranks=2, steps=100, profile=profile, depth=seed % 2, l1=l1)
        violation = Schedule(world, make=make, tamper=tamper).run().violation
        if violation is not None:
            yield violation.what


def assert_found(found: Iterator[str], *words: str) -> None:
    """Some schedule finds the bug, and says so in one of the given words."""
    seen: list[str] = []
    for what in found:
        seen.append(what)
        if any(word in what for word in words):
            return
    pytest.fail(f"no violation in {SEEDS_MAX} seeds names {words}; those that were found: {seen}")
