"""The shared-memory transport keeps the contract with ranks that are threads of one process."""

from collections.abc import Collection
from functools import partial
from typing import Any

import pytest

from lockstep.coordinator.collective import Collective
from lockstep.coordinator.collectives.host_group import HostIdentity
from lockstep.coordinator.collectives.shared_memory import SharedMemoryCollective
from tests.kit.collectives.contract import LANES, PATIENCE_S, CollectiveContract, Hold, Program
from tests.kit.ranks.as_threads import RanksAsThreads


class RanksOverSharedMemory:
    """Each rank is a thread that shares memory with the others as if it was a process."""

    def run(self, program: Program, world_size: int, *, late: Collection[int] = ()) -> list[Any]:
        return RanksAsThreads().run(partial(over_shared_memory, program), world_size, late=late)


def over_shared_memory(program: Program, group: Collective, hold: Hold) -> Any:
    identities = [HostIdentity.here()] * group.world_size
    shared = SharedMemoryCollective.create(group, identities, lanes=LANES, timeout_s=PATIENCE_S)
    return program(shared, hold)


class TestSharedMemory(CollectiveContract):
    """The contract, for ranks that are threads."""

    @pytest.fixture
    def ranks(self) -> RanksOverSharedMemory:
        return RanksOverSharedMemory()
