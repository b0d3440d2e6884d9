MEDIUM_CPU: str
MEDIUM_STORAGE: str

class KVCacheEvent: ...

class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    medium: str | None
    def __init__(
        self,
        *,
        block_hashes: list[bytes | int],
        parent_block_hash: bytes | int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None,
        medium: str | None,
        lora_name: str | None,
        extra_keys: list[tuple[object, ...] | None] | None = ...,
        group_idx: int | None = ...,
        kv_cache_spec_kind: str | None = ...,
        locality: str | None = ...,
    ) -> None: ...

class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    def __init__(
        self,
        *,
        block_hashes: list[bytes | int],
        medium: str | None,
        group_idx: int | None = ...,
        locality: str | None = ...,
    ) -> None: ...
