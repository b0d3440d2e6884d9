"""The connector with a fault on the last rank, for engines whose workers are separate processes.

vLLM imports this module by name, like the real connector. Workers inherit the environment variable with
the fault's name from their engine.
"""

import os

import torch
import torch.distributed as dist

from lockstep.integrations.vllm.connector import LockstepConnector as Connector
from tests.kit.vllm.faults import afflict

FAULT = "LOCKSTEP_TEST_FAULT"


class LockstepConnector(Connector):
    """The connector, which injects a fault in the last rank's worker."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Inject the fault before this process's rank is opened."""
        if dist.get_rank() == dist.get_world_size() - 1:
            afflict(os.environ[FAULT])
        super().register_kv_caches(kv_caches)
