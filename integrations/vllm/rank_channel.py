"""Exchange between the worker's and the scheduler's connector of vLLM, if both are in one process.

vLLM creates the worker's connector first and registers the KV tensors with it. The scheduler's
connector later opens the cache over these tensors.
"""

from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ...ranks.group.host_cache import HostCache
from .contract import EngineCacheConfig, ParallelConfig


@dataclass(slots=True)
class RankChannel:
    """Data that the worker's and the scheduler's connectors of one engine share in one process."""

    kv_caches: dict[str, torch.Tensor]
    cache_config: EngineCacheConfig
    """The worker's cache configuration, which has one KV specification per layer instead of per group.
    """
    cache: HostCache | None = None

    @property
    def opened(self) -> HostCache:
        """The cache that the scheduler's connector has opened; an error if none is open yet."""
        assert self.cache is not None, (
            "the engine steps before its scheduler's connector was created"
        )
        return self.cache


_by_engine: dict[str, RankChannel] = {}


def put(
    engine_id: str, kv_caches: dict[str, torch.Tensor], cache_config: EngineCacheConfig
) -> RankChannel:
    """Store the worker's KV tensors and cache configuration for the scheduler's connector."""
    handover = RankChannel(kv_caches, cache_config)
    _by_engine[engine_id] = handover
    return handover


def take(engine_id: str, parallel: ParallelConfig) -> RankChannel:
    """Return the data that the worker stored; raise `ConfigError` if it is in another process."""
    handover = _by_engine.pop(engine_id, None)
    if handover is None:
        raise ConfigError(
            "LockstepConnector found no worker in the scheduler's process"
            f" (distributed_executor_backend is {parallel.distributed_executor_backend!r}, tensor"
            f" parallel size {parallel.tensor_parallel_size}); it supports one scheduler with the"
            " executors 'mp' and 'ray', and a scheduler on every rank under torchrun, with"
            " VLLM_ENABLE_V1_MULTIPROCESSING=0 and distributed_executor_backend='external_launcher'"
        )
    return handover
