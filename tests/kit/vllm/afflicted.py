"""A connector for separate worker processes that injects a fault on the last rank.

vLLM imports this module by name, as it imports the real connector. The fault's name comes from an
environment variable, which workers inherit from the engine's process.
"""

import os

import torch
import torch.distributed as dist

from lockstep.integrations.vllm.connector import LockstepConnector as Connector
from tests.kit.vllm.faults import afflict

FAULT = "LOCKSTEP_TEST_FAULT"


class LockstepConnector(Connector):
    """The Lockstep connector with a fault in the worker of the last rank."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Inject the fault on the last rank, then register the KV caches and open the rank."""
        if dist.get_rank() == dist.get_world_size() - 1:
            afflict(os.environ[FAULT])
        super().register_kv_caches(kv_caches)
