"""Simulated schedules can be replayed exactly, violate no invariant, and contain every fault.

A failing seed prints the command that replays it.
"""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lockstep.coordinator.operation import OperationKind, Outcome
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import ExplorationReport, explore
from lockstep.simulation.schedule import Schedule, run_schedule
from lockstep.simulation.world.faults import FAULT_PROFILES, Mishap
from lockstep.simulation.world.models import LLAMA, MODEL_PROFILES
from lockstep.simulation.world.world import BOTH, ENGINE, REPLICA, World, draw_world

HYBRIDS = sorted(set(MODEL_PROFILES) - {LLAMA})
# A few seeds per depth. Their schedules contain every event that the tests require.
FEW = {0: range(83, 98), 1: range(61, 76)}
"""Seeds to run, by pipeline depth."""
FEW_LENT = range(1, 18)
FEW_HYBRID = {"gemma": range(1, 4), "qwen-next": range(111, 114), "hybrid-all": range(30, 33)}


@pytest.fixture(
    scope="module",
    params=[pytest.param((depth, FEW[depth]), id=f"depth {depth}") for depth in FEW],
)
def report(request: pytest.FixtureRequest) -> ExplorationReport:
    depth, seeds = request.param
    return explore(
        Exploration(seeds=seeds, ranks=2, steps=100, profile=LLAMA, depth=depth, l1=REPLICA),
        processes=1,
    )


@pytest.fixture(scope="module")
def lent() -> ExplorationReport:
    return explore(Exploration(seeds=FEW_LENT, ranks=2, steps=100, l1=ENGINE), processes=1)


@pytest.fixture(
    scope="module",
    params=[pytest.param((name, FEW_HYBRID[name]), id=name) for name in HYBRIDS],
)
def hybrid(request: pytest.FixtureRequest) -> ExplorationReport:
    profile, seeds = request.param
    return explore(
        Exploration(seeds=seeds, ranks=2, steps=100, profile=profile, l1=REPLICA), processes=1
    )


def assert_no_violation(report: ExplorationReport) -> None:
    assert not report["violations"], "\n".join(
        f"{each['what']}\n  replay: {each['replay']}" for each in report["violations"]
    )


def test_no_schedule_has_a_violation(report: ExplorationReport) -> None:
    assert_no_violation(report)
    assert report["steps"] == 100 * report["schedules"]
    assert report["collectives_per_step_max"] == 1


def test_the_schedules_meet_every_kind_of_fault(report: ExplorationReport) -> None:
    # Leave out spoiled saves (damaged bytes of retracted requests): only pairs of groups have them.
    drawn = {*Mishap} - {Mishap.SPOILED_SAVE}
    assert set(report["faults"]) == {fault.value for fault in drawn}


def test_the_schedules_meet_every_kind_of_operation_and_outcome(report: ExplorationReport) -> None:
    possible = {
        OperationKind.PREFETCH: set(Outcome) - {Outcome.FAILED, Outcome.EXPIRED},
        OperationKind.BACKUP: {Outcome.COMPLETE, Outcome.NO_ROOM, Outcome.FAILED},
        OperationKind.LOAD_BACK: {Outcome.COMPLETE, Outcome.FAILED},
        OperationKind.PERSIST: {Outcome.COMPLETE, Outcome.NO_ROOM, Outcome.FAILED},
        OperationKind.SERVE: {Outcome.ABORTED, Outcome.EXPIRED},
    }
    expected = {
        f"{kind.name} {outcome.name}".lower()
        for kind, all_of in possible.items()
        for outcome in all_of
    }
    assert expected <= set(report["outcomes"])


def happened_in(report: ExplorationReport) -> set[str]:
    return {name for name, times in report["coverage"].items() if times}


def test_the_schedules_use_what_every_tier_holds(report: ExplorationReport) -> None:
    assert {
        "tokens from device",
        "tokens from host",
        "tokens from storage",
        "pages repointed to duplicates",
        "admitted with a priority",
        "admission no_room",
        "admission loading",
        "load back failed",
        "served to peers",
        "preempted",
        "aborted when prefetching",
        "aborted when loading",
        "aborted when computing",
    } <= happened_in(report)


def test_no_schedule_of_a_hybrid_model_has_a_violation(hybrid: ExplorationReport) -> None:
    assert_no_violation(hybrid)
    assert hybrid["collectives_per_step_max"] == 1
    assert hybrid["l1"] == {REPLICA: hybrid["schedules"]}


def test_a_model_meets_what_only_its_components_have(hybrid: ExplorationReport) -> None:
    (profile,) = hybrid["profiles"]
    kinds = MODEL_PROFILES[profile]
    coverage = hybrid["coverage"]
    assert bool(coverage.get("pages left behind by a window")) == (SlidingWindow.kind in kinds)
    assert bool(coverage.get("chunks that end at a checkpoint")) == (Recurrent.kind in kinds)
    assert bool(coverage.get("hits at a checkpoint")) == (Recurrent.kind in kinds)


def test_ranks_that_can_restore_different_lengths_find_a_common_one() -> None:
    report = explore(
        Exploration(seeds=range(102, 103), ranks=4, profile="qwen-next", faults="storage"),
        processes=1,
    )
    assert_no_violation(report)
    assert report["coverage"].get("steps in which ranks look for a common length")


def test_no_schedule_of_an_engine_with_pages_of_its_own_has_a_violation(
    lent: ExplorationReport,
) -> None:
    assert_no_violation(lent)
    assert lent["l1"] == {ENGINE: lent["schedules"]}
    assert lent["collectives_per_step_max"] == 1


def test_an_engine_with_pages_of_its_own_meets_all_that_can_become_of_them(
    lent: ExplorationReport,
) -> None:
    assert {
        "loads",
        "loads failed",
        "backups",
        "fences",
        "preempted",
        "delayed frees",
        "resets",
        "device lost",
        "tokens from device",
        "tokens from host",
        "misuse refused",
        "aborted when prefetching",
        "aborted when loading",
        "aborted when computing",
        "aborted when retracted",
        "pages left behind by a window",
        "loads of a window that begins on the device",
        "loads of a window that begins behind the device",
        "loads that leave lent pages unfilled",
        "states lent as copies",
        "states lent where they are computed",
        "waits for a backup of its state",
        "retracts of whole pages",
        "retracts with a begun page",
        "retracts refused",
        "retracts failed",
        "failed beside a copy that hangs",
        "resumes of whole pages",
        "resumes with a begun page",
        "resumes beside pages on the device",
        "resumes failed",
        "resumes lost",
        "served to peers",
    } <= happened_in(lent)
    outcomes = {name for name, times in lent["outcomes"].items() if times}
    assert {
        "load_back failed",
        "backup failed",
        "backup no_room",
        "prefetch complete",
        "serve aborted",
        "serve expired",
    } <= outcomes


def test_a_device_that_is_lost_ends_the_epoch_and_the_schedule_goes_on() -> None:
    world = draw_world(2, ranks=2, steps=100, faults="calm", depth=1, l1=ENGINE)
    faults = replace(world.faults, rates={Mishap.HUNG_COPY: 0.3}, group_faults={})

    result = Schedule(replace(world, faults=faults)).run()

    assert result.violation is None
    assert result.coverage["device lost"] > 0
    assert result.epochs == 1 + result.coverage["device lost"]


def test_the_seed_draws_who_owns_the_device_pages_and_nothing_else_changes() -> None:
    def worlds(l1: str) -> list[World]:
        return [
            draw_world(seed, ranks=2, steps=100, faults="mixed", depth=0, l1=l1)
            for seed in range(40)
        ]

    drawn, replica, engine = worlds(BOTH), worlds(REPLICA), worlds(ENGINE)

    assert {world.l1 for world in drawn} == {REPLICA, ENGINE}
    assert all(world in {REPLICA: replica, ENGINE: engine}[world.l1] for world in drawn)
    assert [world.faults for world in replica] == [world.faults for world in engine]
    assert all(f"--l1 {world.l1}" in world.replay for world in drawn)


def test_the_seed_draws_the_model_and_all_else_but_its_components_is_the_same() -> None:
    def worlds(profile: str | None) -> list[World]:
        return [
            draw_world(seed, ranks=2, steps=100, profile=profile, depth=0, l1=REPLICA)
            for seed in range(40)
        ]

    drawn, named = worlds(None), {profile: worlds(profile) for profile in MODEL_PROFILES}

    assert {world.profile for world in drawn} == set(MODEL_PROFILES)
    assert all(world == named[world.profile][world.seed] for world in drawn)
    assert [world.faults for world in named[LLAMA]] == [world.faults for world in drawn]
    assert all(f"--profile {world.profile} --faults mixed" in world.replay for world in drawn)


@pytest.mark.parametrize("faults", sorted(FAULT_PROFILES))
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_faults_and_group_sizes_pass_too(faults: str, ranks: int) -> None:
    assert_no_violation(
        explore(Exploration(seeds=range(2), ranks=ranks, faults=faults), processes=1)
    )


@pytest.mark.parametrize(("profile", "l1"), list(product((LLAMA, "hybrid-all"), (REPLICA, ENGINE))))
def test_a_schedule_replays_exactly(profile: str, l1: str) -> None:
    def transcript() -> list[str]:
        world = draw_world(7, ranks=2, steps=100, profile=profile, depth=1, l1=l1)
        return Schedule(world, record=True).run().transcript

    first = transcript()

    assert len(first) > 500
    assert transcript() == first


def test_a_schedule_replays_in_another_process_with_other_hash_seeds() -> None:
    program = (
        "from lockstep.simulation.schedule import run_schedule; "
        "print(run_schedule(7, ranks=2, steps=100, depth=1).fingerprint)"
    )

    def fingerprint(hash_seed: str) -> int:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        return int(done.stdout)

    here = run_schedule(7, ranks=2, steps=100, depth=1).fingerprint
    assert fingerprint("1") == here
    assert fingerprint("2") == here


def test_a_calm_schedule_never_fails_what_it_moves() -> None:
    report = explore(Exploration(seeds=range(15, 20), faults="calm", l1=REPLICA), processes=1)
    assert_no_violation(report)
    assert set(report["faults"]) <= {Mishap.RESTART.value}
    assert report["coverage"]["tokens from storage"] > 0
    assert "load_back failed" not in report["outcomes"]
    assert "backup failed" not in report["outcomes"]


def test_a_calm_schedule_fails_no_load_into_the_pages_of_an_engine() -> None:
    report = explore(Exploration(seeds=range(6, 9), faults="calm", l1=ENGINE), processes=1)
    assert_no_violation(report)
    assert report["coverage"]["tokens from host"] > 0
    assert report["outcomes"]["prefetch complete"] > 0
    assert {"load_back failed", "retract failed", "resume failed"}.isdisjoint(report["outcomes"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"faults": "wild"}, "unknown faults 'wild'; known: mixed"),
        ({"profile": "gpt"}, "unknown profile 'gpt'; known: llama"),
        ({"ranks": 0}, "ranks is 0, must be 1 or more"),
        ({"steps": 99}, "steps is 99, must be 100 or more"),
        ({"l1": "driver"}, "unknown owner of L1 'driver'; known: replica, engine, both"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    possible: dict[str, Any] = {"ranks": 2, "steps": 100, "depth": 0}

    with pytest.raises(ValueError, match=message):
        draw_world(0, **possible | wrong)


def test_a_prefetch_whose_turn_does_not_come_expires() -> None:
    report = explore(Exploration(seeds=range(22, 23), profile=LLAMA, l1=REPLICA), processes=1)
    assert_no_violation(report)
    assert report["outcomes"].get("prefetch expired")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", MODEL_PROFILES)
@pytest.mark.parametrize("l1", [REPLICA, ENGINE])
def test_hundreds_of_longer_schedules_of_four_ranks_have_no_violation(
    profile: str, l1: str
) -> None:
    seeds = range(20_000, 20_250)
    assert_no_violation(
        explore(Exploration(seeds=seeds, ranks=4, steps=150, profile=profile, l1=l1))
    )


def test_an_end_that_left_a_window_to_a_copy_that_failed_is_written_all_the_same() -> None:
    """Regression: after a failed copy of window pages, a prefix that needed them was never written."""
    result = run_schedule(402350, profile="hybrid-all", depth=0, l1="replica")

    assert result.violation is None
