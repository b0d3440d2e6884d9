"""The connector that vLLM loads, a `KVConnectorBase_V1`, for both process layouts of vLLM.

vLLM creates one connector for its scheduler and one in each worker. The scheduler's connector commands
the cache. A worker's connector starts copies at the right points of the forward pass. It also returns
the results of the scheduler's connector to vLLM, because vLLM expects results from workers.

With a scheduler on every rank, both connectors are in one process. With one scheduler for many workers,
the scheduler owns the cache, the workers own the pages, and vLLM carries their messages.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from vllm import __version__ as engine_version
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...errors import ConfigError
from ...ranks.group.one_scheduler.scheduler_cache import SchedulerCache
from . import kv_events, rank_channel
from .contract import (
    BlockPool,
    Blocks,
    EngineConfig,
    HashedCacheConfig,
    PublishingEngine,
    ScheduledStep,
    TransferOutput,
    VllmRequest,
)
from .engine_layout import drafts_after_saves, require_fences
from .engine_metrics import LockstepMetrics, LockstepStats
from .groups import pool_groups
from .lent_blocks import LentBlocks
from .plugin_telemetry import PluginTelemetry
from .scheduler_side import SchedulerSide
from .stats import StatsReport
from .tracked import PassResult
from .vllm_opening import (
    has_one_scheduler_process,
    open_beside_worker,
    open_for_workers,
    open_worker_rank,
    read_settings,
)
from .worker_modes import (
    Ballots,
    OpenedRank,
    PassMetadata,
    RemoteScheduler,
    SchedulerOnEveryRank,
    WorkerHalf,
)


class InOrder(set[str]):
    """A set of request ids, for vLLM, with iteration in insertion order.

    vLLM frees blocks in iteration order. The iteration order of a plain set differs between ranks, so
    the ranks' prefix caches would diverge.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(dict.fromkeys(names))
        super().__init__(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def joined(self, names: Iterable[str]) -> "InOrder":
        """Return a set with the ids of this set, followed by the ids in `names`."""
        return InOrder((*self._names, *names))


class LockstepConnector(KVConnectorBase_V1, SupportsHMA):
    """Lockstep as a KV connector of vLLM; see `lockstep.integrations.vllm` for its configuration."""

    def __init__(
        self,
        vllm_config: PublishingEngine,
        role: KVConnectorRole,
        kv_cache_config: HashedCacheConfig,
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._config, self._cache_config = vllm_config, kv_cache_config
        self._engine_id = transfer.engine_id or ""
        self._one_scheduler = has_one_scheduler_process(vllm_config.parallel_config)
        self._worker: WorkerHalf | None = None
        self._opened: bytes | None = None
        self._handshakes: list[bytes] = []
        """Handshake messages from the workers, encoded: each describes the rank that the worker has
        opened."""
        self._result: PassResult | None = None
        self._scheduler: SchedulerSide | None = None
        self._watching: PluginTelemetry | None = None
        self._settings = read_settings(vllm_config)
        if self._one_scheduler:
            require_fences(vllm_config, kv_cache_config)
        self._lending = LentBlocks(pool_groups(kv_cache_config))
        self._events = kv_events.wanted(vllm_config, kv_cache_config, self._settings.store)
        if role is KVConnectorRole.SCHEDULER:
            _watch_weight_versions(LockstepConnector._weights_are)
            if not self._one_scheduler:
                self._scheduler = open_beside_worker(
                    vllm_config, self._lending, self._settings, self._engine_id, self._events
                )
                self._watching = PluginTelemetry(self._scheduler, self._settings.store)

    # The methods of a worker's connector follow, in the order of a step.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open this worker's rank in one-scheduler mode; else pass its KV tensors to the scheduler."""
        if self._one_scheduler:
            rank, self._opened = open_worker_rank(
                self._config,
                self._cache_config,
                self._settings,
                kv_caches,
                names_pages=self._events is not None,
            )
            self._worker = RemoteScheduler(
                rank,
                self._settings.timeouts.fence_s,
                drafts_last=drafts_after_saves(self._config, engine_version),
            )
        else:
            self._worker = SchedulerOnEveryRank(
                rank_channel.put(self._engine_id, kv_caches, self._cache_config)
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._opened is None else OpenedRank(self._opened)

    def unregister_kv_caches(self) -> None:
        """Wait for all copies, because vLLM 0.33 calls this before it unmaps the KV for sleep mode."""
        self._half.wait_for_copies()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Apply the scheduler's commands, and wait for copies from blocks that this step overwrites."""
        self._half.apply_metadata(_pass(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the step's loads. vLLM calls this on the engine's stream before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        metadata = _pass(connector_metadata)
        self._half.apply_metadata(metadata)
        self._result = metadata.result
        self._half.begin_loads()

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Do nothing, because `bind_connector_metadata` has already started the asynchronous loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request computes only after its load is complete on every rank."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Do nothing, because whole pages are copied after the forward pass."""

    def wait_for_save(self) -> None:
        """Start backups of this forward pass's pages; the pages' blocks remain allocated."""
        self._half.begin_backups()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose transfers finished in this step, as found by the scheduler's side."""
        result, self._result = self._result, None
        if result is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_sending=InOrder(result.freed),
            finished_recving=InOrder(result.loaded),
            failed_recving=InOrder(result.failed),
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's ballot for the scheduler.

        With a drafter, vLLM calls this before `wait_for_save`, which starts the step's backups.
        """
        return self._half.ballots()

    # The methods of the scheduler's connector follow.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Store vLLM's block pool, in which refcounts keep blocks allocated while they are copied."""
        self._lending.held.pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the cache over the workers' ranks in one-scheduler mode; otherwise do nothing.

        vLLM 0.33 repeats the handshake after each sleep. A repeated handshake is ignored, because the
        workers' ranks stay open during sleep.
        """
        if not self._one_scheduler:
            return
        handshakes = sorted(
            each.opened for each in metadata.values() if isinstance(each, OpenedRank)
        )
        if handshakes == self._handshakes:
            return
        if self._handshakes:
            raise ConfigError("the workers have reopened their caches; restart the engine")
        self._handshakes = handshakes
        self._scheduler = open_for_workers(
            self._config, self._lending, self._settings, handshakes, self._events
        )
        self._watching = PluginTelemetry(self._scheduler, self._settings.store)

    def on_new_request(self, request: VllmRequest) -> None:
        self._side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: VllmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens all ranks can load after vLLM's own hit; None until ranks agree."""
        tokens = self._side.hit(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: Blocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)
            self._watched.load_begun(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: ScheduledStep) -> KVConnectorMetadata:
        """End the scheduler's pass: issue its commands, launch the round and return the metadata."""
        result = self._side.end_pass(scheduler_output)
        self._watched.loads_ended(result)
        cache = self._side.cache
        return PassMetadata(
            result,
            cache.dispatch() if isinstance(cache, SchedulerCache) else b"",
            computes=bool(scheduler_output.total_num_scheduled_tokens),
        )

    def request_finished_all_groups(
        self, request: VllmRequest, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (whether vLLM must keep the request's blocks, parameters for the response)."""
        return self._finished(request, block_ids[0])

    def request_finished(
        self, request: VllmRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids)

    def update_connector_output(self, connector_output: TransferOutput) -> None:
        """Add transfers that finished after the step to the step's output, in case no step follows."""
        cache = self._side.cache
        if isinstance(cache, SchedulerCache):
            ballots = connector_output.kv_connector_worker_meta
            if isinstance(ballots, Ballots):
                cache.deliver(ballots.folded, ballots.counts)
            settled: PassResult | None = self._side.answered()
        else:
            settled = self._side.settle()
        if settled is not None:
            self._watched.loads_ended(settled)
            sent = InOrder(connector_output.finished_sending or ()).joined(settled.freed)
            received = InOrder(connector_output.finished_recving or ()).joined(settled.loaded)
            connector_output.finished_sending = sent
            connector_output.finished_recving = received

    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine must keep stepping, because ranks vote only in steps."""
        side = self._scheduler
        if side is None or not isinstance(side.cache, SchedulerCache):
            return False
        return side.cache.can_progress or side.gives

    def has_pending_block_frees(self) -> bool:
        """Return whether vLLM should wait instead of preempting a request: blocks will be free soon."""
        return self._side.pending_frees

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take(self._side.cache)

    def get_external_cache_hit_sources(
        self, request: VllmRequest, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found = self._watched.hit_sources(request, num_external_tokens)
        return {CacheHitSource(source): tokens for source, tokens in found.items()}

    def reset_cache(self) -> bool:
        """Wait for all copies, and stop matching pages of possibly previous weights; return True."""
        self._forget_events(changed=self._side.reset())
        return True

    # The methods that both connectors have follow.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return how the statistics have changed since the last report; None if no report is due.

        In one-scheduler mode, workers send their own statistics together with their ballots.
        """
        report = None if self._watching is None else self._watching.report()
        return None if report is None else LockstepStats(data=report)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: vLLM recomputes missing pages, so it does not depend on this cache."""
        return False

    def shutdown(self) -> None:
        """Flush I/O in flight and leave the group. Every rank must call this.

        vLLM also calls this method when the process exits. In that case `sys.last_value` says whether
        an exception caused the exit.
        """
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.close(failed=getattr(sys, "last_value", None) is not None)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """Request contiguous blocks with heads first.

        Such blocks are fastest to copy, but Lockstep supports any layout.
        """
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: StatsReport | None = None) -> KVConnectorStats:
        return LockstepStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LockstepMetrics:
        return LockstepMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _watched(self) -> PluginTelemetry:
        assert self._watching is not None, "this is the worker's connector"
        return self._watching

    def _finished(
        self, request: VllmRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._watched.request_gone(request)
        handoff = self._side.handoff(request)
        keeps = self._side.finished(request, block_ids)
        return keeps, None if handoff is None else handoff.params(self._engine_id)

    def _weights_are(self, version: str) -> None:
        self._forget_events(changed=self._side.weights_are(version))

    def _forget_events(self, *, changed: bool) -> None:
        if changed and self._events is not None:
            self._events.forget()

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is the worker's connector, or it was shut down"
        return self._scheduler

    @property
    def _half(self) -> WorkerHalf:
        assert self._worker is not None, "the engine has registered no KV, or it was shut down"
        return self._worker


def _pass(metadata: KVConnectorMetadata) -> PassMetadata:
    assert isinstance(metadata, PassMetadata)
    return metadata


def _watch_weight_versions(pass_on: Callable[[LockstepConnector, str], None]) -> None:
    """Make vLLM's engine core pass each new weight version to the scheduler's connector; idempotent.

    vLLM sets the version in the engine core (`finish_weight_update(weight_version=...)`,
    `update_weight_version`), in the scheduler's process, and does not pass it to connectors itself.
    """
    engine: Any = EngineCore
    set_version = engine.set_weight_version
    if hasattr(set_version, "__wrapped__"):
        return

    @wraps(set_version)
    def wrapper(core: Any, weight_version: str) -> None:
        set_version(core, weight_version)
        connector = core.scheduler.connector
        if isinstance(connector, LockstepConnector):
            pass_on(connector, weight_version)

    engine.set_weight_version = wrapper
