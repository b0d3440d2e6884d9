from typing import Any

from .unified_cache.component_type import ComponentType

class CacheInitParams:
    page_size: int
    chunked_prefill_size: int | None
    token_to_kv_pool_allocator: Any
    req_to_token_pool: Any
    tree_components: tuple[ComponentType, ...] | None
    @property
    def swa_retain_window(self) -> int | None: ...
