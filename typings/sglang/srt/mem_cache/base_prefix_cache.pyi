from typing import Any, NamedTuple

import torch

from .radix_cache import RadixKey
from .unified_cache.component_type import ComponentType

class CacheRequestHandle:
    rid: str
    attempt_id: int

class MatchPrefixParams:
    key: RadixKey
    req: Any | None
    def __init__(self, key: RadixKey, cow_mamba: bool = ..., req: Any | None = ...) -> None: ...

class InsertParams:
    mamba_value: torch.Tensor | None
    def __init__(
        self,
        key: RadixKey | None = ...,
        value: torch.Tensor | None = ...,
        *,
        prev_prefix_len: int = ...,
    ) -> None: ...
    def set_evicted_seqlen(self, component_type: ComponentType, length: int) -> None: ...

class EvictParams:
    mamba_num: int
    def __init__(
        self, num_tokens: int = ..., swa_num_tokens: int = ..., mamba_num: int = ...
    ) -> None: ...

class InitLoadBackParams:
    best_match_node: Any
    host_hit_length: int
    req: Any | None

class MatchResult(NamedTuple):
    device_prefix_len: int
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any
    host_hit_length: int = ...
    swa_host_hit_length: int = ...
    mamba_branching_seqlen: int | None = ...
