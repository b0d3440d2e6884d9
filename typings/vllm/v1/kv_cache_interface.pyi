from enum import StrEnum
from typing import Any

class FullAttentionSpec:
    page_size_bytes: int
    def __init__(
        self, block_size: int, *, num_kv_heads: int, head_size: int, dtype: object
    ) -> None: ...

class KVCacheTensor:
    def __init__(
        self, size: int, layers: list[str], layer_stride: int, block_stride: int
    ) -> None: ...

class KVCacheGroupSpec:
    def __init__(self, layer_names: list[str], kv_cache_spec: object) -> None: ...

class KVCacheConfig:
    def __init__(
        self, num_blocks: int, kv_cache_tensors: list[Any], kv_cache_groups: list[Any]
    ) -> None: ...

class KVCacheSpecKind(StrEnum):
    FULL_ATTENTION = "full_attention"

def get_kv_cache_spec_kind(kv_cache_spec: object) -> KVCacheSpecKind: ...
