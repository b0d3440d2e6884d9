"""The in-process transport keeps the contract, in threads and in the turns of one thread."""

import numpy as np
import pytest

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import PeerLost, UsageError
from tests.kit.collectives.contract import PATIENCE_S, CollectiveContract
from tests.kit.ranks.as_threads import RanksAsThreads


class TestInProcess(CollectiveContract):
    """The contract, for ranks that are threads."""

    @pytest.fixture
    def ranks(self) -> RanksAsThreads:
        return RanksAsThreads()


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
