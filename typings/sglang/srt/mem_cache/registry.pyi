from collections.abc import Callable
from typing import Any

from .cache_init_params import CacheInitParams

class TreeCacheBuildContext:
    server_args: Any
    params: CacheInitParams
    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    tp_worker: Any
    model_config: Any
    tp_size: int
    tp_rank: int

def register_radix_cache_backend(
    name: str, factory: Callable[[TreeCacheBuildContext], Any]
) -> None: ...
