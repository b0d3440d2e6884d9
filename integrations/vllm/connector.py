"""The connector that vLLM loads: `KVConnectorBase_V1`, in both forms in which vLLM runs.

vLLM makes it twice or more: once for its scheduler, and once in each worker. The scheduler's instance
holds the cache and gives it commands; a worker's begins the copies where the forward pass stands, and
hands back to the scheduler what the scheduler's half has decided, since that is the way on which vLLM
expects to hear of it.

With a scheduler on every rank both instances are in one process. With one scheduler and many workers
the cache is the scheduler's, its pages are the workers', and vLLM brings what they say to each other.
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
from ...ranks.group.decider.deciding import DecidingCache
from . import handover, kv_events
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
from .halves import (
    Ballots,
    BesideScheduler,
    OpenedRank,
    PassMetadata,
    UnderScheduler,
    WorkerHalf,
)
from .lending import Lending
from .opening import (
    has_one_decider,
    open_beside_worker,
    open_for_workers,
    open_worker_rank,
    read_settings,
)
from .scheduler_side import SchedulerSide
from .stats import Told
from .tracked import PassResult
from .watching import Watching


class InOrder(set[str]):
    """A set of request ids, as vLLM wants it, that is iterated in the order in which it was made.

    vLLM frees blocks in the order in which it iterates, and a plain set of ids would be iterated in
    another order on each rank; from then on their prefix caches would differ.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(dict.fromkeys(names))
        super().__init__(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def joined(self, names: Iterable[str]) -> "InOrder":
        """Return these ids and then `names`."""
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
        self._one_decider = has_one_decider(vllm_config.parallel_config)
        self._worker: WorkerHalf | None = None
        self._opened: bytes | None = None
        self._told: list[bytes] = []
        """The ranks that the workers named in the handshake."""
        self._result: PassResult | None = None
        self._scheduler: SchedulerSide | None = None
        self._watching: Watching | None = None
        self._settings = read_settings(vllm_config)
        if self._one_decider:
            require_fences(vllm_config, kv_cache_config)
        self._lending = Lending(pool_groups(kv_cache_config))
        self._events = kv_events.wanted(vllm_config, kv_cache_config, self._settings.store)
        if role is KVConnectorRole.SCHEDULER:
            _hear_weight_versions(LockstepConnector._weights_are)
            if not self._one_decider:
                self._scheduler = open_beside_worker(
                    vllm_config, self._lending, self._settings, self._engine_id, self._events
                )
                self._watching = Watching(self._scheduler, self._settings.store)

    # The worker's half, in the order of a step.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open this rank over the KV tensors, or leave them for the scheduler's half beside it."""
        if self._one_decider:
            rank, self._opened = open_worker_rank(
                self._config,
                self._cache_config,
                self._settings,
                kv_caches,
                names_pages=self._events is not None,
            )
            self._worker = UnderScheduler(
                rank,
                self._settings.timeouts.fence_s,
                drafts_last=drafts_after_saves(self._config, engine_version),
            )
        else:
            self._worker = BesideScheduler(
                handover.put(self._engine_id, kv_caches, self._cache_config)
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._opened is None else OpenedRank(self._opened)

    def unregister_kv_caches(self) -> None:
        """Let no copy touch the KV, which vLLM is about to unmap: it goes to sleep (from 0.33 on)."""
        self._half.wait_for_copies()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Let no copy touch a block that this step may overwrite."""
        self._half.obey(_pass(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the loads: this is before the forward pass, on the engine's stream."""
        super().bind_connector_metadata(connector_metadata)
        metadata = _pass(connector_metadata)
        self._half.obey(metadata)
        self._result = metadata.result
        self._half.begin_loads()

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Do nothing: loads are asynchronous, and have begun."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request computes only once its load has ended on every rank."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Do nothing: whole pages are copied after the forward pass."""

    def wait_for_save(self) -> None:
        """Begin the backups of what the forward pass computes; the engine keeps their blocks."""
        self._half.begin_backups()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what every rank tells the scheduler in this step, as the scheduler has decided it."""
        result, self._result = self._result, None
        if result is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_sending=InOrder(result.freed),
            finished_recving=InOrder(result.loaded),
            failed_recving=InOrder(result.failed),
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's ballot; with a drafter vLLM asks for it before `wait_for_save`."""
        return self._half.ballots()

    # The scheduler's half.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool, in which blocks can be held while they are copied."""
        self._lending.held.pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the cache for the workers, which have told of their ranks, if it is not theirs.

        vLLM 0.33 repeats the handshake whenever it wakes up. The workers' ranks stay open meanwhile.
        """
        if not self._one_decider:
            return
        told = sorted(each.opened for each in metadata.values() if isinstance(each, OpenedRank))
        if told == self._told:
            return
        if self._told:
            raise ConfigError("the workers have opened their caches anew; start the engine anew")
        self._told = told
        self._scheduler = open_for_workers(
            self._config, self._lending, self._settings, told, self._events
        )
        self._watching = Watching(self._scheduler, self._settings.store)

    def on_new_request(self, request: VllmRequest) -> None:
        self._side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: VllmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many more tokens every rank can load, or None while that is not agreed."""
        tokens = self._side.hit(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: Blocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)
            self._watched.load_begun(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: ScheduledStep) -> KVConnectorMetadata:
        """End the scheduler's pass: give the commands that follow from it, launch the round."""
        result = self._side.end_pass(scheduler_output)
        self._watched.loads_ended(result)
        cache = self._side.cache
        return PassMetadata(
            result,
            cache.dispatch() if isinstance(cache, DecidingCache) else b"",
            computes=bool(scheduler_output.total_num_scheduled_tokens),
        )

    def request_finished_all_groups(
        self, request: VllmRequest, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the request's blocks must be kept while some rank still copies them."""
        return self._finished(request, block_ids[0])

    def request_finished(
        self, request: VllmRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids)

    def update_connector_output(self, connector_output: TransferOutput) -> None:
        """Add what has settled since the step, before the engine reads it and perhaps stops."""
        cache = self._side.cache
        if isinstance(cache, DecidingCache):
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
        """Say whether an engine without requests has to go on stepping, since only steps bring news."""
        side = self._scheduler
        if side is None or not isinstance(side.cache, DecidingCache):
            return False
        return side.cache.stepping_helps or side.gives

    def has_pending_block_frees(self) -> bool:
        """Say whether waiting frees blocks, so that no request need be preempted for them."""
        return self._side.pending_frees

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take(self._side.cache)

    def get_external_cache_hit_sources(
        self, request: VllmRequest, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found = self._watched.hit_sources(request, num_external_tokens)
        return {CacheHitSource(source): tokens for source, tokens in found.items()}

    def reset_cache(self) -> bool:
        """Let no copy touch a block, and offer nothing that may be of former weights."""
        self._tell_events(changed=self._side.reset())
        return True

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was added to the statistics, now and then; workers tell with their ballots."""
        told = None if self._watching is None else self._watching.told()
        return None if told is None else LockstepStats(data=told)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    def shutdown(self) -> None:
        """Write out what is on its way, and leave the group. Every rank calls it.

        vLLM calls it at the end of the process too, where `sys.last_value` says whether an exception
        has brought that about.
        """
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.close(failed=getattr(sys, "last_value", None) is not None)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """Prefer contiguous blocks, heads first: they are copied fastest. Any order is served."""
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: Told | None = None) -> KVConnectorStats:
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
    def _watched(self) -> Watching:
        assert self._watching is not None, "this is the worker's half"
        return self._watching

    def _finished(
        self, request: VllmRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._watched.request_gone(request)
        handoff = self._side.handoff(request)
        keeps = self._side.finished(request, block_ids)
        return keeps, None if handoff is None else handoff.params(self._engine_id)

    def _weights_are(self, version: str) -> None:
        self._tell_events(changed=self._side.weights_are(version))

    def _tell_events(self, *, changed: bool) -> None:
        if changed and self._events is not None:
            self._events.forget()

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is the worker's half, or it was shut down"
        return self._scheduler

    @property
    def _half(self) -> WorkerHalf:
        assert self._worker is not None, "the engine has registered no KV, or it was shut down"
        return self._worker


def _pass(metadata: KVConnectorMetadata) -> PassMetadata:
    assert isinstance(metadata, PassMetadata)
    return metadata


def _hear_weight_versions(tell: Callable[[LockstepConnector, str], None]) -> None:
    """Tell a scheduler's connector each version that its engine is told from now on; idempotent.

    vLLM keeps that name in its engine core (`finish_weight_update(weight_version=...)`,
    `update_weight_version`), and tells no connector. The engine core is in the process of the scheduler
    in every form in which vLLM runs. vLLM does what it does without it.
    """
    engine: Any = EngineCore
    set_version = engine.set_weight_version
    if hasattr(set_version, "__wrapped__"):
        return

    @wraps(set_version)
    def told(core: Any, weight_version: str) -> None:
        set_version(core, weight_version)
        connector = core.scheduler.connector
        if isinstance(connector, LockstepConnector):
            tell(connector, weight_version)

    engine.set_weight_version = told
