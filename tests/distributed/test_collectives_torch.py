"""The torch transport keeps the contract, over gloo, with ranks that die, freeze and are ended."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collective_contract import (
    PATIENCE_S,
    PROMPT_S,
    SHORT_S,
    CollectiveContract,
    Hold,
    meet,
    outcome_of,
)
from ranks_as_processes import RanksAsProcesses

from lockstep.coordinator.collectives.base import Collective
from lockstep.coordinator.collectives.torch_gloo import TorchCollective
from lockstep.errors import ConfigError, GroupError

pytestmark = pytest.mark.distributed

RANK = Path(__file__).with_name("torch_rank.py")


@pytest.fixture
def ranks(tmp_path: Path) -> RanksAsProcesses:
    return RanksAsProcesses(tmp_path)


class TestTorch(CollectiveContract):
    """The contract, for ranks that are processes."""

    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path)


@pytest.mark.parametrize("world_size", [2, 4])
def test_when_a_rank_is_killed_all_survivors_end_promptly(
    ranks: RanksAsProcesses, world_size: int
) -> None:
    """Rule R10: the news of a dead rank spreads, since who hears it leaves the group too."""
    with ranks.start(die, world_size) as group:
        for rank in range(world_size - 1):
            error, waited_s = group.result(rank)
            assert error == "PeerLost"
            assert waited_s < PROMPT_S


def test_a_frozen_rank_is_a_timeout_within_the_deadline_and_close_is_not_held(
    ranks: RanksAsProcesses,
) -> None:
    """Rule R10: a rank that is stopped, and so neither answers nor leaves, holds nobody."""
    with ranks.start(freeze, 4) as group:
        for rank in range(3):
            error, waited_s, closed_s = group.result(rank)
            assert error == "CollectiveTimeout"
            assert SHORT_S * 0.9 <= waited_s < SHORT_S + PROMPT_S
            assert closed_s < 2.0


def test_other_traffic_of_the_process_does_not_reach_the_rounds(ranks: RanksAsProcesses) -> None:
    """Rule R1: the group is Lockstep's alone, so the order of others' collectives is no matter."""
    expected = [number * 2 for number in range(40)]

    for rounds, sums in ranks.run(share_the_process, 2):
        assert rounds == expected
        assert sums == [2 * number + 1 for number in range(40)]


def test_without_a_default_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchCollective.create(timeout_s=1.0)


def test_close_is_safe_after_the_engine_has_begun_anew(
    ranks: RanksAsProcesses, tmp_path: Path
) -> None:
    """The engine may have destroyed every group and made others before it closes its cache."""
    again = partial(close_after_a_new_start, f"file://{tmp_path / 'again'}")

    assert ranks.run(again, 1) == ["PeerLost"]


def test_a_group_that_was_left_while_a_round_was_pending_goes_when_others_are_made(
    ranks: RanksAsProcesses,
) -> None:
    """Rule R10: a process that rebuilds its group again and again keeps nothing of the old ones."""
    assert ranks.run(leave_and_make_others, 2) == [(1, 0)] * 2


def test_no_rank_has_a_group_before_every_rank_has_connected(ranks: RanksAsProcesses) -> None:
    """Rule R10: or one that leaves at once would make those fail that are still connecting."""
    first, _ = ranks.run(create_behind, 2, late=[1])

    assert first == "no group"


@pytest.mark.parametrize("ending", ["close", "forget", "destroy_default", "collect"])
def test_a_process_with_a_pending_round_exits_at_once(ending: str, tmp_path: Path) -> None:
    """Rule R10: the end of a process is a wait too."""
    with two_processes(ending, tmp_path) as (first, _):
        assert line_of(first) == "pending"
        started = time.monotonic()
        assert first.wait(PATIENCE_S) == 0, first.stderr
        assert time.monotonic() - started < PROMPT_S


def test_a_process_that_waits_for_a_round_can_be_interrupted(tmp_path: Path) -> None:
    """Rule R10: Ctrl-C reaches the engine although its rank waits for another."""
    with two_processes("wait", tmp_path) as (first, _):
        assert line_of(first) == "pending"
        started = time.monotonic()
        assert line_of(first) == "interrupted"
        assert first.wait(PATIENCE_S) == 0
        assert time.monotonic() - started < PROMPT_S


def die(collective: Collective, hold: Hold) -> tuple[str, float]:
    meet(collective, "round", PATIENCE_S)
    if collective.rank == collective.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = outcome_of(partial(meet, collective, "round", PATIENCE_S))
    collective.close()
    return outcome


def freeze(collective: Collective, hold: Hold) -> tuple[str, float, float]:
    meet(collective, "round", PATIENCE_S)
    if collective.rank == collective.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    error, waited_s = outcome_of(partial(meet, collective, "round", SHORT_S))
    started = time.monotonic()
    collective.close()
    return error, waited_s, time.monotonic() - started


def close_after_a_new_start(init_method: str, collective: Collective, hold: Hold) -> str:
    import torch.distributed as dist

    meet(collective, "round", PATIENCE_S)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=init_method, rank=0, world_size=1)
    collective.close()
    return outcome_of(partial(meet, collective, "round", PATIENCE_S))[0]


def leave_and_make_others(collective: Collective, hold: Hold) -> tuple[int, int]:
    """Return how many groups a rank has after rank 0 left the first, and after others were made."""
    meet(collective, "round", PATIENCE_S)
    if collective.rank == 0:
        collective.launch(np.zeros(1, dtype=np.int64))
        collective.close()
    TorchCollective.create(timeout_s=PATIENCE_S).close()
    kept_while_pending = groups_kept()
    collective.close()
    for _ in range(20):
        TorchCollective.create(timeout_s=PATIENCE_S).close()
    return kept_while_pending, groups_kept()


def create_behind(collective: Collective, hold: Hold) -> str:
    """Return whether a group was made, by a rank whose peer stays in the making of it."""
    if collective.rank == 1:
        import torch.distributed

        dist: Any = torch.distributed
        make = dist.new_group

        def make_and_stay(*args: Any, **kwargs: Any) -> Any:
            group = make(*args, **kwargs)
            hold()
            return group

        dist.new_group = make_and_stay
    try:
        TorchCollective.create(timeout_s=4 * SHORT_S)
    except GroupError:
        return "no group"
    return "a group"


def groups_kept() -> int:
    return sum(thread.name == "lockstep-gloo-owner" for thread in threading.enumerate())


def share_the_process(collective: Collective, hold: Hold) -> tuple[list[int], list[int]]:
    """Interleave rounds with sums over the default group, in another way on each rank."""
    import torch
    import torch.distributed as dist

    rng = random.Random(collective.rank)
    rounds: list[int] = []
    sums: list[torch.Tensor] = []
    works: list[Any] = []

    def add() -> None:
        sums.append(torch.tensor([len(sums) + collective.rank]))
        works.append(dist.all_reduce(sums[-1], async_op=True))

    for number in range(40):
        lanes = np.array([number * 2 + collective.rank], dtype=np.int64)
        pending = collective.launch(lanes)
        for _ in range(rng.randrange(3)):
            if len(sums) < 40:
                add()
        rounds += pending.wait(PATIENCE_S).tolist()
    while len(sums) < 40:
        add()
    for work in works:
        work.wait()
    return rounds, [int(each) for each in sums]


@contextmanager
def two_processes(
    ending: str, folder: Path
) -> Generator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Start two ranks: the first launches a round and ends as told, the other never comes."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(folder / "store"), ending, str(PATIENCE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process prints; its own deadline bounds the wait."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
