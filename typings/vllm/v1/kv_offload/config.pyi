from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

@dataclass
class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int

@dataclass
class OffloadingModelConfig:
    name: str
    dtype: str

@dataclass
class OffloadingCacheConfig:
    tokens_per_hash: int
    blocks_per_chunk: int

@dataclass
class OffloadingParallelConfig:
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    data_parallel_size: int
    data_parallel_rank_local: int | None
    is_parallelism_agnostic: bool

@dataclass
class OffloadingConfig:
    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    enable_kv_cache_events: bool
    extra_config: Mapping[str, Any]
    engine_id: str
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    replicated_layout: bool = ...
    canonical_layout: bool = ...
    kv_cache_layout: str | None = ...
