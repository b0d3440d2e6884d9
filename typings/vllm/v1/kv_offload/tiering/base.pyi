from collections.abc import Collection
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..base import Locality, Medium, OffloadingSpec, OffloadKey, ReqContext
from .backpressure import BackpressureDetector

class TransferJob:
    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: npt.NDArray[np.int32]
    is_promotion: bool
    req_context: ReqContext
    def __init__(
        self,
        job_id: int,
        keys: Collection[OffloadKey],
        chunk_ids: npt.NDArray[np.int32],
        is_promotion: bool,
        req_context: ReqContext,
    ) -> None: ...

class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None
    transfer_time: float | None
    transfer_bytes: int | None
    def __init__(
        self,
        job_id: int,
        success: bool,
        successful_keys: Collection[OffloadKey] | None = ...,
        transfer_time: float | None = ...,
        transfer_bytes: int | None = ...,
    ) -> None: ...

class SecondaryTierManager:
    medium: ClassVar[Medium | None]
    locality: Locality | None
    tier_type: str
    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = ...,
    ) -> None: ...
    @property
    def bp_detector(self) -> BackpressureDetector | None: ...
