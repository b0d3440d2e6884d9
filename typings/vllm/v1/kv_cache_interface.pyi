from enum import StrEnum

class FullAttentionSpec: ...

class KVCacheSpecKind(StrEnum):
    FULL_ATTENTION = "full_attention"

def get_kv_cache_spec_kind(kv_cache_spec: object) -> KVCacheSpecKind: ...
