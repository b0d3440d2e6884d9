"""The transports that share memory keep the contract, with ranks that are processes.

Hosts are pretended: ranks of one machine are told that they are on several. What goes between hosts
goes over gloo as it would between machines.
"""

from functools import partial
from pathlib import Path

import pytest
from collective_contract import CollectiveContract
from ranks_as_processes import RanksAsProcesses, over_hosts, over_shared_memory

pytestmark = pytest.mark.distributed


class TestSharedMemory(CollectiveContract):
    """The contract, for ranks of one host."""

    @pytest.fixture
    def ranks(self, tmp_path: Path) -> RanksAsProcesses:
        return RanksAsProcesses(tmp_path, over_shared_memory)


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
