from collections.abc import Mapping
from typing import Any

class KVConnectorStats:
    data: dict[str, Any]
    def __init__(self, data: dict[str, Any] = ...) -> None: ...

class KVConnectorPromMetrics:
    per_engine_labelvalues: dict[int, list[object]]
    _labelnames: list[str]
    _counter_cls: Any
    _gauge_cls: Any
    _histogram_cls: Any
    def __init__(
        self,
        vllm_config: object,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None: ...
