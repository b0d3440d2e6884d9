from typing import Any

class OffloadingConnectorStats:
    def is_empty(self) -> bool: ...
    def reduce(self) -> dict[str, float]: ...
    def increase_counter(
        self,
        counter_name: str,
        counter_increase_value: float = ...,
        labelvalues: tuple[str, ...] = ...,
    ) -> None: ...
    def set_gauge(
        self, gauge_name: str, gauge_value: float, labelvalues: tuple[str, ...] = ...
    ) -> None: ...

class OffloadPromMetrics:
    def __init__(
        self,
        vllm_config: object,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None: ...
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = ...) -> None: ...
