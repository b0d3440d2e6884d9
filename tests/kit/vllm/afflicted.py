"""The connector with a fault on one rank, for an engine whose workers are processes of its own.

vLLM finds it as it finds the connector itself, by this module's name; which fault it is stands in the
environment, which workers have from their engine.
"""

import os

import torch
import torch.distributed as dist

from lockstep.integrations.vllm.connector import LockstepConnector as Connector
from tests.kit.vllm.faults import afflict

FAULT = "LOCKSTEP_TEST_FAULT"


class LockstepConnector(Connector):
    """The connector; in the worker of the last rank with a fault."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Bring the fault upon this process before its rank is opened."""
        if dist.get_rank() == dist.get_world_size() - 1:
            afflict(os.environ[FAULT])
        super().register_kv_caches(kv_caches)
