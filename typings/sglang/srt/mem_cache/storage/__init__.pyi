from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

class StorageBackendFactory:
    @staticmethod
    def create_backend(
        backend_name: str, storage_config: HiCacheStorageConfig, mem_pool_host: Any
    ) -> Any: ...
