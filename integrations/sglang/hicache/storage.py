"""The storage class that SGLang's HiCache loads by name, on top of any Lockstep store.

    --enable-hierarchical-cache
    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{
        "backend_name": "lockstep", "interface_v1": 1,
        "module_path": "lockstep.integrations.sglang.hicache.storage", "class_name": "LockstepStorage",
        "store": "file:///mnt/kv", "weights_version": "1"}'

`hicache_settings.py` lists the other keys. With `interface_v1`, pages move between the store and
HiCache's host memory without a copy, in the layouts that keep a page together (`pages.py`). Without it,
SGLang copies each page once more.

Every page is an object whose header has its name and checksum; both are verified on read. A missing,
damaged or late page is a miss. Names depend on model, `weights_version`, number format, layout, page
size and rank (`names.py`). SGLang does not notify its storage of in-place weight updates. After an
update, attach the storage again with another `weights_version`, or clear it.

This module imports SGLang; the other modules of the storage do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from .calls import HiCacheCalls
from .contract import EngineFacts, HicacheHostPool, StorageConfig
from .names import KV

_FACTS: Final = ("dtype", "kv_cache_dtype", "quantization", "revision", "json_model_override_args")
"""SGLang arguments that change page contents without changing the pools' dtypes.

For example, two 8-bit number formats have the same dtype in a pool.
"""


class LockstepStorage(HiCacheStorage):
    """One rank's HiCache storage. Raises `ConfigError` if it cannot start; later calls never raise.

    SGLang's pool names are string enum members; they are converted to plain text here.
    """

    def __init__(self, storage_config: StorageConfig, _: Mapping[str, Any] | None = None) -> None:
        self._calls = HiCacheCalls(storage_config, _engine_facts())
        self._takes_stats = storage_config.enable_storage_metrics

    def register_mem_pool_host(self, mem_pool_host: HicacheHostPool) -> None:
        """Register the main pool and open the store.

        SGLang undoes an attach if this method raises an exception.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._calls.open(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HicacheHostPool, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._calls.add_pool(str(host_pool_name), host_pool)

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._calls.leading(keys)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        found = self._calls.find(keys, pool_transfers or ())
        return PoolTransferResult(found.pages, found.pool_pages, found.restorable)

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._calls.read(KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._calls.write(KV, keys, host_indices)

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._calls.read(str(each.name), each.keys or [], each.host_indices)
            for each in transfers
        }

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._calls.write(str(each.name), each.keys or [], each.host_indices)
            for each in transfers
        }

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[Any] | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        if not all(isinstance(each, torch.Tensor) for each in targets):
            return [None] * len(keys)
        well = self._calls.read_flat(keys, targets)
        # If `targets` is shorter than `keys`, every flag from `read_flat` is False, so this line never
        # indexes `targets` beyond its end.
        return [targets[at] if is_there else None for at, is_there in enumerate(well)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Any] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        pages = list(values or [])
        if not all(isinstance(each, torch.Tensor) for each in pages):
            return False
        return all(self._calls.write_flat(keys, pages))

    def exists(self, key: str) -> bool:
        return self._calls.leading([key]) == 1

    def clear(self) -> bool:
        return self._calls.clear()

    def get_stats(self) -> StorageMetrics | None:
        if not self._takes_stats:
            return None
        read, written = self._calls.take_moved()
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in read],
            backup_pgs=[each.pages for each in written],
            prefetch_bandwidth=[each.gb_per_s for each in read],
            backup_bandwidth=[each.gb_per_s for each in written],
        )

    def close(self) -> None:
        """Close the store. Call it only after the last storage call has returned."""
        self._calls.close()


def _engine_facts() -> EngineFacts:
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415

    try:
        arguments = get_server_args()
    except ValueError:
        # This process runs no SGLang engine, so there are no server arguments.
        return {}
    return {name: repr(getattr(arguments, name)) for name in _FACTS}
