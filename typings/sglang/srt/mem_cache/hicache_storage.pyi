from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch

class HiCacheStorageConfig:
    def __init__(
        self,
        tp_rank: int,
        tp_size: int,
        pp_rank: int,
        pp_size: int,
        attn_cp_rank: int,
        attn_cp_size: int,
        is_mla_model: bool,
        enable_storage_metrics: bool,
        is_page_first_layout: bool,
        model_name: str | None,
        tp_lcm_size: int | None = ...,
        should_split_heads: bool = ...,
        dp_rank: int = ...,
        extra_config: dict[str, Any] | None = ...,
        dcp_size: int = ...,
        dcp_rank: int = ...,
        logical_page_size: int | None = ...,
    ) -> None: ...
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    model_name: str | None
    tp_lcm_size: int | None
    extra_config: dict[str, Any] | None
    dcp_size: int

class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None

class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"

class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"

class PoolTransfer:
    def __init__(
        self,
        name: PoolName,
        host_indices: torch.Tensor | None = ...,
        device_indices: torch.Tensor | None = ...,
        keys: list[str] | None = ...,
        hit_policy: PoolHitPolicy = ...,
        nodes_to_load: list[Any] | None = ...,
        indices_from_pool: PoolName | None = ...,
        block_pages: int = ...,
        group_pages: int = ...,
    ) -> None: ...
    name: PoolName
    host_indices: torch.Tensor | None
    keys: list[str] | None
    hit_policy: PoolHitPolicy
    block_pages: int
    group_pages: int

class PoolTransferResult:
    def __init__(
        self,
        kv_hit_pages: int,
        extra_pool_hit_pages: dict[str, int],
        restorable_prefix_pages: list[int] | None = ...,
    ) -> None: ...
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None

class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...
    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = ...
    ) -> int: ...
