"""Passes the changes of statistics from `stats` to vLLM's log and to vLLM's Prometheus metrics."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ...storage_backends.latencies import BOUNDS_S
from ...telemetry.families import EXECUTOR_FAMILIES, PREFIX, Family, Type
from .contract import EngineConfig, ParallelConfig
from .stats import ALL, Number, StatsReport, add, line, spread

_registered: list[Any] = []
"""Metrics of this process's last engine; they are unregistered when another engine starts."""


class LockstepStats(KVConnectorStats):
    """A report of Lockstep's statistics; vLLM carries it from the engine to vLLM's log and metrics."""

    data: StatsReport

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return LockstepStats(data=add(self.data, other.data))

    def reduce(self) -> dict[str, Number]:
        return line(self.data)

    def is_empty(self) -> bool:
        return not self.data


class LockstepMetrics(KVConnectorPromMetrics):
    """Lockstep's metrics in vLLM's registry, with the same names as at `metrics_port`.

    vLLM's labels are added.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        while _registered:
            # Ignore metrics that vLLM has created through Ray, because they are not in the registry.
            with suppress(KeyError):
                REGISTRY.unregister(_registered.pop())
        self._metrics = {name: self._made(family) for name, family in ALL.items()}
        _registered.extend(self._metrics.values())
        self._begin_at_0(vllm_config.parallel_config)

    def observe(self, transfer_stats_data: StatsReport, engine_idx: int = 0) -> None:
        """Add a report from an engine to the metrics."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            family, metric = ALL[name], self._metrics[name]
            for joined, value in values.items():
                labelled = metric.labels(*engine, *joined.split(","))
                if family.type is Type.COUNTER:
                    labelled.inc(value)
                elif family.type is Type.GAUGE:
                    labelled.set(value)
                else:
                    for each, times in spread(cast("list[Number]", value)):
                        for _ in range(times):
                            labelled.observe(each)

    def _begin_at_0(self, parallel: ParallelConfig) -> None:
        """Create all counters at 0, so that they exist before the engine's first report."""
        # Create only this rank's counters if every rank has a scheduler, because each process then
        # reports only its own rank.
        alone = parallel.distributed_executor_backend == "external_launcher"
        own = parallel.rank if alone else 0
        workers = [own] if alone else range(parallel.world_size)
        for engine in self.per_engine_labelvalues.values():
            for family in ALL.values():
                for rank in workers if family in EXECUTOR_FAMILIES else [own]:
                    for labels in family.zeros():
                        self._metrics[family.name].labels(*engine, str(rank), *labels)

    def _made(self, family: Family[Any]) -> Any:
        options: dict[str, Any] = {
            "name": f"{PREFIX}{family.name}",
            "documentation": family.meaning,
            "labelnames": [*self._labelnames, "rank", *family.labels],
        }
        if family.type is Type.COUNTER:
            return self._counter_cls(**options)
        if family.type is Type.GAUGE:
            return self._gauge_cls(**options, multiprocess_mode="mostrecent")
        return self._histogram_cls(**options, buckets=BOUNDS_S)
