from typing import Any

from ..base import OffloadingManager, OffloadingMetricMetadata, OffloadingSpec, OffloadingWorker
from ..config import OffloadingConfig

class TieringOffloadingSpec(OffloadingSpec):
    num_chunks: int
    kv_bytes_per_chunk: int
    cpu_page_size_per_worker: int
    _engine_id: str
    _worker: OffloadingWorker | None
    _scheduler_mmap: Any
    def __init__(self, config: OffloadingConfig) -> None: ...
    def get_manager(self) -> OffloadingManager: ...
    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]: ...
