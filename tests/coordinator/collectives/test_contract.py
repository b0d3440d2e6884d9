"""Run the collective contract over every transport, with hosts simulated on one machine.

Traffic between simulated hosts goes over gloo, as it would between machines.
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.coordinator.collectives.torch_gloo import TorchCollective
from lockstep.errors import PeerLost, UsageError
from tests.kit.collectives.contract import PATIENCE_S, CollectiveContract, Hold, Program, lanes_of
from tests.kit.ranks.as_processes import BUILDS, RanksAsProcesses, over_hosts, over_shared_memory
from tests.kit.ranks.as_threads import RanksAsThreads


class TestInProcess(CollectiveContract):
    @pytest.fixture
    def ranks(self) -> RanksAsThreads:
        return RanksAsThreads()


class ThreadsOverSharedMemory:
    """Run each rank as a thread that shares memory with the others as a process would."""

    def run(self, program: Program, world_size: int, *, late: Collection[int] = ()) -> list[Any]:
        def over_memory(group: Collective, hold: Hold) -> Any:
            return program(over_shared_memory(group), hold)

        return RanksAsThreads().run(over_memory, world_size, late=late)


class TestSharedMemory(CollectiveContract):
    @pytest.fixture
    def ranks(self) -> ThreadsOverSharedMemory:
        return ThreadsOverSharedMemory()


@pytest.mark.distributed
class TestTorch(CollectiveContract):
    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path)


@pytest.mark.distributed
class TestTwoRanksToAHost(CollectiveContract):
    """The collective contract over simulated hosts of two ranks; an odd last rank has its own host."""

    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path, partial(over_hosts, 2))


@pytest.mark.distributed
class TestOneRankToAHost(CollectiveContract):
    """The collective contract over simulated hosts of one rank each, so no ranks share memory."""

    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path, partial(over_hosts, 1))


@pytest.mark.distributed
@pytest.mark.parametrize("name", BUILDS)
def test_a_transport_can_be_made_again_in_processes_that_have_closed_one(
    name: str, tmp_path: Path
) -> None:
    """A group that is rebuilt after an error must not connect to addresses of the previous group."""
    assert RanksAsProcesses(tmp_path).run(partial(open_again, name), 4) == [[3, 3, 3]] * 4


def open_again(name: str, group: TorchCollective, hold: Hold) -> list[int]:
    group.close()
    folded: list[int] = []
    for _ in range(3):
        collective = BUILDS[name](TorchCollective.create(timeout_s=PATIENCE_S))
        lanes = collective.launch(lanes_of(3 + collective.rank)).wait(PATIENCE_S)
        folded.append(int(lanes[-1]))
        collective.gather(b"", PATIENCE_S)
        collective.close()
    return folded


def test_a_round_that_every_rank_joined_is_delivered_although_one_has_left_since() -> None:
    group = InProcessGroup(2)
    members = [group.member(rank) for rank in range(2)]
    pending = [member.launch(np.array([member.rank], dtype=np.int64)) for member in members]

    members[1].close()

    assert pending[0].wait(0.0).tolist() == [0]
    with pytest.raises(PeerLost, match="rank 1 has left"):
        members[0].launch(np.zeros(1, dtype=np.int64)).wait(PATIENCE_S)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_group_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} is not in a group of 2"):
        InProcessGroup(2).member(rank)
