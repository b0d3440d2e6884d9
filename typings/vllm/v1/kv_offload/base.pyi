from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt
import torch

from .config import OffloadingConfig

OffloadKey = NewType("OffloadKey", bytes)

def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey: ...

class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"

class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"

class TierMatcher(NamedTuple):
    medium: Medium | None = ...
    locality: Locality | None = ...

class TierFilter:
    def __init__(self, matchers: tuple[TierMatcher, ...] = ...) -> None: ...

class ReqContext:
    req_id: str
    def __init__(self, req_id: str, **options: Any) -> None: ...

class LookupResult(Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4

class OffloadPolicy(Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"

class RequestOffloadingContext:
    policy: OffloadPolicy

class ScheduleEndContext(NamedTuple):
    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]

class LoadStoreSpec: ...

class BlockIDsLoadStoreSpec(LoadStoreSpec):
    block_ids: npt.NDArray[np.int32]

class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    group_sizes: Sequence[int]

class OffloadingEvent:
    keys: list[OffloadKey]
    medium: Medium
    removed: bool
    locality: Locality | None
    def __init__(
        self,
        keys: list[OffloadKey],
        medium: Medium,
        removed: bool,
        locality: Locality | None = ...,
    ) -> None: ...

class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...]
    def __init__(self, documentation: str, labelnames: tuple[str, ...] = ...) -> None: ...

class OffloadingCounterMetadata(OffloadingMetricMetadata): ...
class OffloadingGaugeMetadata(OffloadingMetricMetadata): ...

class OffloadingKVEventsConfig:
    enable_kv_cache_events: bool

class CanonicalKVCacheTensor:
    tensor: torch.Tensor
    page_size_bytes: int

class CopyRun:
    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int

class CanonicalPageMapping:
    canonical_page_size_bytes: int
    runs: tuple[CopyRun, ...]

class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int
    mapping: CanonicalPageMapping

class CanonicalKVCaches:
    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]

class TransferResult:
    def __init__(self, job_id: int, success: bool) -> None: ...

class OffloadingManager: ...
class OffloadingWorker: ...

class OffloadingSpec:
    config: OffloadingConfig
    kv_events_config: OffloadingKVEventsConfig
