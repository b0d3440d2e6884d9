"""The two halves of one engine's plug-in meet here: they are made apart, in one process.

vLLM makes the worker's half first and tells it of the KV tensors; the scheduler's half then opens the
cache over them. A scheduler whose worker lives in another process finds nothing here.
"""

from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ...ranks.group.host_cache import HostCache
from .contract import EngineCacheConfig, ParallelConfig


@dataclass(slots=True)
class Handover:
    """Holds what the halves of one engine give each other."""

    kv_caches: dict[str, torch.Tensor]
    """The worker's KV tensors, by layer name."""
    cache_config: EngineCacheConfig
    """The worker's, which says of each layer what it keeps; the scheduler's says it of each group."""
    cache: HostCache | None = None
    """The scheduler's cache, once it is open."""

    @property
    def opened(self) -> HostCache:
        """The scheduler's cache."""
        assert self.cache is not None, "the engine steps before its scheduler's half was made"
        return self.cache


_by_engine: dict[str, Handover] = {}


def put(
    engine_id: str, kv_caches: dict[str, torch.Tensor], cache_config: EngineCacheConfig
) -> Handover:
    """Leave the worker's KV tensors for the scheduler's half."""
    handover = Handover(kv_caches, cache_config)
    _by_engine[engine_id] = handover
    return handover


def take(engine_id: str, parallel: ParallelConfig) -> Handover:
    """Return what the worker's half has left; raises `ConfigError` if that is in another process."""
    handover = _by_engine.pop(engine_id, None)
    if handover is None:
        raise ConfigError(
            "LockstepConnector found no worker in the scheduler's process"
            f" (distributed_executor_backend is {parallel.distributed_executor_backend!r}, tensor"
            f" parallel size {parallel.tensor_parallel_size}); it serves one scheduler with the"
            " executors 'mp' and 'ray', and a scheduler on every rank under torchrun, with"
            " VLLM_ENABLE_V1_MULTIPROCESSING=0 and distributed_executor_backend='external_launcher'"
        )
    return handover
