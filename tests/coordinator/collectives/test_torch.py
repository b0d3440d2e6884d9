"""The torch transport with ranks that die, freeze or never join."""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives.torch_gloo import PresenceKeys, TorchCollective
from lockstep.errors import ConfigError, GroupError
from tests.kit.collectives.contract import (
    PATIENCE_S,
    PROMPT_S,
    SHORT_S,
    Hold,
    meet,
    outcome_of,
)
from tests.kit.ranks.as_processes import RanksAsProcesses

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

pytestmark = pytest.mark.distributed


@pytest.fixture
def ranks(tmp_path: Path) -> RanksAsProcesses:
    return RanksAsProcesses(tmp_path)


@pytest.mark.parametrize("world_size", [2, 4])
def test_when_a_rank_is_killed_all_survivors_end_promptly(
    ranks: RanksAsProcesses, world_size: int
) -> None:
    """Rule R10: every rank that notices a rank's death leaves the group, so that all others notice."""
    with ranks.start(die, world_size) as group:
        outcomes = [group.result(rank) for rank in range(world_size - 1)]

    assert {error for error, _ in outcomes} == {"PeerLost"}
    assert max(waited_s for _, waited_s in outcomes) < PROMPT_S


def test_a_frozen_rank_is_a_timeout_within_the_deadline_and_close_is_not_held(
    ranks: RanksAsProcesses,
) -> None:
    """Rule R10: no rank waits past the deadline for a stopped rank that neither answers nor leaves."""
    with ranks.start(freeze, 4) as group:
        outcomes = [group.result(rank) for rank in range(3)]

    assert {error for error, _, _ in outcomes} == {"CollectiveTimeout"}
    assert min(waited_s for _, waited_s, _ in outcomes) >= SHORT_S * 0.9
    assert max(waited_s for _, waited_s, _ in outcomes) < SHORT_S + PROMPT_S
    assert max(closed_s for _, _, closed_s in outcomes) < 2.0


@pytest.mark.parametrize(
    ("absent", "named"), [([0], "rank 0"), ([2], "rank 2"), ([1, 2], "ranks 1, 2")]
)
def test_who_does_not_come_to_a_gathering_is_named_to_all_who_do(
    ranks: RanksAsProcesses, absent: list[int], named: str
) -> None:
    """If a rank does not join a gather, all others name it, so operators see why the start hangs."""
    errors = ranks.run(partial(gather_without, absent), 4, late=absent)

    text = f"{named} did not join a gather within {SHORT_S} s"
    assert errors == ["" if rank in absent else text for rank in range(4)]


def test_ranks_that_are_joined_without_the_others_are_named_as_those_know_them(
    ranks: RanksAsProcesses,
) -> None:
    """The error names global ranks: in a group of ranks 1 and 3, the missing one is rank 3."""
    errors = ranks.run(join_some, 4, late=[3])

    assert errors[1] == f"rank 3 did not join a gather within {SHORT_S} s"


def test_a_rank_that_dies_before_a_gathering_is_named(
    ranks: RanksAsProcesses,
) -> None:
    with ranks.start(die_before_a_gathering, 3) as group:
        errors = [group.result(rank) for rank in (0, 1)]

    assert [message.rpartition("; ")[2] for message in errors] == ["rank 2 had not joined"] * 2


def test_a_store_that_does_not_answer_holds_nobody_and_then_nobody_is_named() -> None:
    answers = threading.Event()
    attendance = PresenceKeys(cast("Store", SilentStore(answers)), [0, 1], 0)
    attendance.come()

    assert attendance.absent() == []
    answers.set()


def test_a_store_that_is_gone_names_nobody() -> None:
    attendance = PresenceKeys(cast("Store", GoneStore()), [0, 1], 0)
    attendance.come()

    assert attendance.absent() == []


def test_a_value_that_is_not_in_the_store_is_not_waited_for_as_long_as_torch_does(
    ranks: RanksAsProcesses,
) -> None:
    """Rule R10: reading a deleted control request fails after two seconds."""
    [(error, value)] = ranks.run(read_what_is_not_there, 1)

    assert error.endswith("after 2000 ms")
    assert value == b"a"


def test_other_traffic_of_the_process_does_not_reach_the_rounds(ranks: RanksAsProcesses) -> None:
    """Rule R1: Lockstep uses a separate process group, so other collectives cannot reorder rounds."""
    rounds = [number * 2 for number in range(40)]
    sums = [2 * number + 1 for number in range(40)]

    assert ranks.run(share_the_process, 2) == [(rounds, sums)] * 2


def test_without_a_default_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchCollective.create(timeout_s=1.0)


def test_close_is_safe_after_the_engine_has_begun_anew(
    ranks: RanksAsProcesses, tmp_path: Path
) -> None:
    """Closing a cache is safe even after the engine has replaced torch's process groups."""
    again = partial(close_after_a_new_start, f"file://{tmp_path / 'again'}")

    assert ranks.run(again, 1) == ["PeerLost"]


def test_a_group_that_was_left_while_a_round_was_pending_goes_when_others_are_made(
    ranks: RanksAsProcesses,
) -> None:
    assert ranks.run(leave_and_make_others, 2) == [(1, 0)] * 2


def test_no_rank_has_a_group_before_every_rank_has_connected(ranks: RanksAsProcesses) -> None:
    """Rule R10: no rank gets a group before all ranks have connected.

    Otherwise a rank could use and leave the group early, and the others would fail to connect.
    """
    first, _ = ranks.run(create_behind, 2, late=[1])

    assert first == "no group"


def die(collective: Collective, hold: Hold) -> tuple[str, float]:
    meet(collective, "round", PATIENCE_S)
    if collective.rank == collective.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = outcome_of(partial(meet, collective, "round", PATIENCE_S))
    collective.close()
    return outcome


def gather_without(absent: list[int], collective: Collective, hold: Hold) -> str:
    """Gather twice, the second time without the absent ranks; return the other ranks' error."""
    collective.gather(b"", PATIENCE_S)
    if collective.rank in absent:
        hold()
        return ""
    try:
        collective.gather(b"", SHORT_S)
    except GroupError as error:
        return str(error)
    return "all came"


def join_some(collective: Collective, hold: Hold) -> str:
    """Create a group of ranks 1 and 3; return rank 1's error when rank 3 misses a gather."""
    if collective.rank in (0, 2):
        return ""
    some = TorchCollective.among([1, 3], collective.rank, "some", timeout_s=PATIENCE_S)
    if collective.rank == 3:
        hold()
        return ""
    try:
        some.gather(b"", SHORT_S)
    except GroupError as error:
        return str(error)
    return "all came"


def die_before_a_gathering(collective: Collective, hold: Hold) -> str:
    collective.gather(b"", PATIENCE_S)
    if collective.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collective.gather(b"", PATIENCE_S)
    except GroupError as error:
        return str(error)
    finally:
        collective.close()
    return "all came"


class SilentStore:
    """A torch store whose server process is stopped: writes succeed, and reads block."""

    def __init__(self, answers: threading.Event) -> None:
        self._answers = answers

    def set(self, key: str, value: str) -> None:
        """Succeed without a server, because a socket's send buffer accepts the value."""

    def check(self, keys: list[str]) -> bool:
        """Block until the store's process is continued."""
        return self._answers.wait(PATIENCE_S)

    def get(self, key: str) -> bytes:
        """Return a fixed value for any key."""
        return b"0"


class GoneStore(SilentStore):
    """A torch store whose server process has ended."""

    def __init__(self) -> None:
        super().__init__(threading.Event())

    def set(self, key: str, value: str) -> None:
        """Raise the RuntimeError that torch raises for a broken pipe."""
        raise RuntimeError("Broken pipe")

    def check(self, keys: list[str]) -> bool:
        """Raise the RuntimeError that torch raises for a reset connection."""
        raise RuntimeError("Connection reset by peer")


def freeze(collective: Collective, hold: Hold) -> tuple[str, float, float]:
    meet(collective, "round", PATIENCE_S)
    if collective.rank == collective.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    error, waited_s = outcome_of(partial(meet, collective, "round", SHORT_S))
    started = time.monotonic()
    collective.close()
    return error, waited_s, time.monotonic() - started


def read_what_is_not_there(collective: Collective, hold: Hold) -> tuple[str, bytes]:
    store = collective.common_store("requests")
    try:
        store.get("1")
    except RuntimeError as error:
        store.set("1", b"a")
        return str(error), store.get("1")
    raise AssertionError


def close_after_a_new_start(init_method: str, collective: Collective, hold: Hold) -> str:
    import torch.distributed as dist

    meet(collective, "round", PATIENCE_S)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=init_method, rank=0, world_size=1)
    collective.close()
    return outcome_of(partial(meet, collective, "round", PATIENCE_S))[0]


def leave_and_make_others(collective: Collective, hold: Hold) -> tuple[int, int]:
    """Let rank 0 leave while a round is pending; return two counts of torch groups that still exist.

    The second count is taken after 20 more groups have been created and closed.
    """
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
    """Return whether rank 0's `create` returned a group although rank 1 hangs while creating it."""
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
    """Run rounds and sums over the default group, interleaved in a different order on each rank."""
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
