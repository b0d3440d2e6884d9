"""The transports that share memory keep the contract, with ranks that are processes.

Hosts are pretended: ranks of one machine are told that they are on several. What goes between hosts
goes over gloo as it would between machines.
"""

from functools import partial
from pathlib import Path

import pytest

from lockstep.coordinator.collectives.torch_gloo import TorchCollective
from tests.kit.collectives.contract import PATIENCE_S, CollectiveContract, Hold, lanes_of
from tests.kit.ranks.as_processes import BUILDS, RanksAsProcesses, over_hosts

pytestmark = pytest.mark.distributed


class TestTwoRanksToAHost(CollectiveContract):
    """The contract, for hosts of two ranks, and one of one."""

    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path, partial(over_hosts, 2))


class TestOneRankToAHost(CollectiveContract):
    """The contract, for ranks that share no host: each speaks for its own."""

    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path, partial(over_hosts, 1))


@pytest.mark.parametrize("name", ["torch", "shm", "hierarchical"])
def test_a_transport_can_be_made_again_in_processes_that_have_closed_one(
    name: str, tmp_path: Path
) -> None:
    """Who rebuilds a group after an error must not meet the addresses of the one before."""
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
