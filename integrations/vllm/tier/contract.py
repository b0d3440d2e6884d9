"""What the tier uses of vLLM's configuration of offloading, as of vLLM 0.32."""

from collections.abc import Sequence
from typing import Protocol


class OffloadedGroup(Protocol):
    """`vllm.v1.kv_offload.config.OffloadingGroupConfig`."""

    tokens_per_block: int

    @property
    def layer_names(self) -> Sequence[str]:
        """The layers of the group."""
        ...


class OffloadedModel(Protocol):
    """`vllm.v1.kv_offload.config.OffloadingModelConfig`."""

    name: str
    dtype: str


class OffloadedCache(Protocol):
    """`vllm.v1.kv_offload.config.OffloadingCacheConfig`."""

    tokens_per_hash: int
    blocks_per_chunk: int


class OffloadingRanks(Protocol):
    """`vllm.v1.kv_offload.config.OffloadingParallelConfig`."""

    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    is_parallelism_agnostic: bool


class OffloadingConfig(Protocol):
    """`vllm.v1.kv_offload.config.OffloadingConfig`."""

    replicated_layout: bool
    canonical_layout: bool
    kv_cache_layout: str | None

    @property
    def groups(self) -> Sequence[OffloadedGroup]:
        """The groups of layers whose KV is offloaded."""
        ...

    @property
    def model(self) -> OffloadedModel:
        """The model, as far as offloading is told of it."""
        ...

    @property
    def cache(self) -> OffloadedCache:
        """What a chunk consists of."""
        ...

    @property
    def parallel(self) -> OffloadingRanks:
        """How ranks divide the model."""
        ...
