"""Runs SGLang's own host pools with Lockstep's storage, connected as HiCache connects them.

python -m tests.kit.sglang.hicache_pools <what> <folder>, where `what` is `write` or `read`. Each pool
layout uses a separate store in the folder. The program prints the results of each layout's calls as
JSON.
"""

import json
import sys
from hashlib import sha256
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE_SIZE = 16
PAGES = 12
LAYERS = 3
LAYOUTS = ("page_first", "page_first_direct", "layer_first")
FIVE, LATER = [0, 1, 2, 3, 4], [7, 8, 9, 10, 11]


def kv_pool(layout: str) -> Any:
    device = MHATokenToKVPool(
        size=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE_SIZE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * PAGE_SIZE,
        start_layer=0,
        end_layer=LAYERS,
    )


def state_pool(layout: str) -> Any:
    """Return SGLang's host pool for recurrent states, with one state per page."""
    return MambaPoolHost(
        MambaStateBufferInfo(
            temporal=torch.zeros((LAYERS, PAGES, 2, 4), dtype=torch.float32),
            conv=(torch.zeros((LAYERS, PAGES, 6), dtype=torch.bfloat16),),
        ),
        1.0,
        0,
        device_capacity=PAGES,
        pin_memory=False,
        layout="page_first_direct" if layout == "layer_first" else layout,
    )


def fill(pool: Any, seed: int) -> None:
    """Fill every page of a host pool with random bytes through SGLang's own methods."""
    generator = torch.Generator().manual_seed(seed)
    for page in range(PAGES):
        flat = pool.get_dummy_flat_data_page()
        drawn = torch.randint(0, 256, (flat.nbytes,), generator=generator).to(torch.uint8)
        pool.set_from_flat_data_page(page * pool.page_size, drawn.view(flat.dtype))


def digests(pool: Any, pages: list[int]) -> list[str]:
    """Return SHA-256 digests of pages, read through SGLang's own methods."""
    return [
        sha256(
            pool.get_data_page(page * pool.page_size).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for page in pages
    ]


def slots(pool: Any, pages: list[int]) -> torch.Tensor:
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def keys_of(numbers: list[int]) -> list[str]:
    """Return page keys in HiCache's format."""
    return [f"{number:064x}" for number in numbers]


def states(pool: Any, numbers: list[int], pages: list[int]) -> PoolTransfer:
    """Return a transfer between these pages of recurrent states and the objects with these numbers."""
    indices = slots(pool, pages)
    return PoolTransfer(name=PoolName.MAMBA, host_indices=indices, keys=keys_of(numbers))


def write(storage: Any, kv: Any, mamba: Any) -> list[Any]:
    """Write five KV pages and two states; return the outcomes and the digests of their content."""
    written = storage.batch_set_v1(keys_of(FIVE), slots(kv, FIVE))
    of_states = storage.batch_set_v2([states(mamba, [1, 4], [1, 4])])[PoolName.MAMBA]
    return [written, of_states, digests(kv, FIVE), digests(mamba, [1, 4])]


def read(storage: Any, kv: Any, mamba: Any) -> list[Any]:
    """Look up the objects, read them into new pages, and clear the store; return all results."""
    keys = keys_of([*FIVE, 5])
    last = PoolTransfer(
        name=PoolName.MAMBA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    found = [storage.batch_exists(keys), storage.batch_exists_v2(keys, [last])]
    restored = storage.batch_get_v1(keys_of(FIVE), slots(kv, LATER))
    of_states = storage.batch_get_v2([states(mamba, [1, 4], [6, 7])])[PoolName.MAMBA]
    held = [digests(kv, LATER), digests(mamba, [6, 7])]
    cleared = [storage.clear(), storage.batch_exists(keys_of(FIVE))]
    return [found[0], found[1].restorable_prefix_pages, restored, of_states, *held, *cleared]


def run(what: str, store: str, layout: str) -> dict[str, Any]:
    """Attach the storage as HiCache does, run the calls, and detach the storage."""
    pools = {"kv": kv_pool(layout), "mamba": state_pool(layout)}
    for number, pool in enumerate(pools.values()):
        fill(pool, number + 100 * (what == "read"))
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=True,
        is_page_first_layout=layout == "page_first",
        model_name="a model",
        extra_config={
            "backend_name": "lockstep",
            "module_path": "lockstep.integrations.sglang.hicache.storage",
            "class_name": "LockstepStorage",
            "interface_v1": 1,
            "store": store,
        },
    )
    storage = StorageBackendFactory.create_backend("dynamic", config, pools["kv"])
    storage.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, PoolName(name))
    storage.on_host_pools_registered()
    answers = {"write": write, "read": read}[what](storage, **pools)
    stats = storage.get_stats()
    storage.close()
    return {"answers": answers, "moved": [sum(stats.prefetch_pgs), sum(stats.backup_pgs)]}


if __name__ == "__main__":
    _, what, folder = sys.argv
    results = {layout: run(what, f"file://{folder}/{layout}", layout) for layout in LAYOUTS}
    sys.stdout.write(json.dumps(results) + "\n")
