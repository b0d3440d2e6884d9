"""The connector that vLLM loads: `KVConnectorBase_V1`, in the form with a scheduler on every rank.

vLLM makes it twice in each process. The scheduler's instance holds the cache and gives it commands;
the worker's instance begins the copies where the forward pass stands, and hands back to the scheduler
what its own half has decided, since that is the way on which vLLM expects to hear of it.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm import __version__ as engine_version
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ...errors import ConfigError
from ...ranks.config import CacheConfig
from ...ranks.executor.engine_pages import EnginePages
from ...ranks.host_cache import HostCache
from ...storage_backends.uri import without_secrets
from ...telemetry.port import watch
from ..settings import control_of
from ..weights import FileDigests
from . import handover, settings
from .adapters import Adapters
from .contract import (
    Blocks,
    EngineCacheConfig,
    EngineConfig,
    ScheduledStep,
    TransferOutput,
    VllmRequest,
)
from .engine_layout import EngineLayout, require_supported
from .kv_identity import configuration_digest, weights_of
from .scheduler_side import PassResult, SchedulerSide

if TYPE_CHECKING:
    from .contract import TransferConfig

log = logging.getLogger("vllm.lockstep")
"""Below vLLM's own logger, which is the only one for which vLLM prints what is no warning."""


@dataclass
class PassMetadata(KVConnectorMetadata):
    """Carries what the scheduler's half gives the worker's half for one step."""

    result: PassResult


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
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: EngineCacheConfig,
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._engine_id = transfer.engine_id or ""
        self._handover: handover.Handover | None = None
        self._result: PassResult | None = None
        self._scheduler: SchedulerSide | None = None
        parsed = settings.parse(transfer.kv_connector_extra_config)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        require_supported(vllm_config, spec, FullAttentionSpec)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _open(vllm_config, kv_cache_config, parsed, self._engine_id)

    # The worker's half, in the order of a step.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Leave the KV tensors for the scheduler's half."""
        self._handover = handover.put(self._engine_id, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the loads: this is before the forward pass, on the engine's stream."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PassMetadata)
        self._result = connector_metadata.result
        self._cache.begin_loads()

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
        self._cache.begin_backups()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what every rank tells its scheduler in this step."""
        result, self._result = self._result, None
        if result is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_sending=InOrder(result.freed),
            finished_recving=InOrder(result.loaded),
            failed_recving=InOrder(result.failed),
        )

    # The scheduler's half.

    def on_new_request(self, request: VllmRequest) -> None:
        """Begin to bring what storage has of it."""
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
        """Begin the load."""
        if num_external_tokens:
            self._side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: ScheduledStep) -> KVConnectorMetadata:
        """End the scheduler's pass: give the commands that follow from it, launch the round."""
        return PassMetadata(self._side.end_pass(scheduler_output))

    def request_finished_all_groups(
        self, request: VllmRequest, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether the request's blocks must be kept while some rank still copies them."""
        return self._side.finished(request, block_ids[0]), None

    def request_finished(
        self, request: VllmRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for an engine with one group of layers."""
        return self._side.finished(request, block_ids), None

    def update_connector_output(self, connector_output: TransferOutput) -> None:
        """Add what has settled since the step, before the engine reads it and perhaps stops."""
        settled = self._side.settle()
        if settled is not None:
            sent = InOrder(connector_output.finished_sending or ()).joined(settled.freed)
            received = InOrder(connector_output.finished_recving or ()).joined(settled.loaded)
            connector_output.finished_sending = sent
            connector_output.finished_recving = received

    def has_pending_block_frees(self) -> bool:
        """Say whether waiting frees blocks, so that no request need be preempted for them."""
        return self._side.cache.pending_frees

    def reset_cache(self) -> bool:
        """Offer nothing of what is cached now any more, in host memory and in storage."""
        self._side.reset()
        return True

    # Both.

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    def shutdown(self) -> None:
        """Write out what is on its way, and leave the group. Every rank calls it.

        vLLM calls it at the end of the process too, where `sys.last_value` says whether an exception
        has brought that about.
        """
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.close(failed=getattr(sys, "last_value", None) is not None)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """Prefer contiguous blocks, heads first: they are copied fastest. Any order is served."""
        return "LBHNC"

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is the worker's half, or it was shut down"
        return self._scheduler

    @property
    def _cache(self) -> HostCache:
        assert self._handover is not None
        assert self._handover.cache is not None
        return self._handover.cache


def _open(
    config: EngineConfig,
    cache_config: EngineCacheConfig,
    parsed: settings.ConnectorSettings,
    engine_id: str,
) -> SchedulerSide:
    """Open this rank's cache over the KV tensors of its worker. Every rank comes here."""
    parallel, transfer = config.parallel_config, cast("TransferConfig", config.kv_transfer_config)
    met = handover.take(engine_id, parallel)
    layers = config.compilation_config.static_forward_context
    engine = EngineLayout.of(cache_config, parallel.world_size, met.kv_caches, layers)
    # Every rank holds as much of a page; which part of it is known only once the group is.
    shard = engine.layout.shard(0, parallel.world_size)
    records = Path(parsed.weight_digests or f"{envs.VLLM_CACHE_ROOT}/lockstep").expanduser()
    read = FileDigests(records / "weights.json", log=log)
    weights = weights_of(config, parsed.weights_version, read)
    rest = configuration_digest(
        config, engine_version=engine_version, environment=envs.compile_factors()
    )
    met.cache = HostCache.open(
        CacheConfig(
            model=parsed.model or config.model_config.model,
            weights_version=f"{weights}/{rest}",
            layout=engine.layout,
            host_pages=parsed.pages(shard.page_bytes),
            populate_host=True,
            store=parsed.store,
            stop_policy=parsed.stop_policy,
            pipeline_depth=parsed.pipeline_depth,
            transport=parsed.transport,
            bounds=parsed.bounds,
            timeouts=parsed.timeouts,
            control=control_of(parsed),
        ),
        EnginePages(shard, engine.tensors),
    )
    if met.cache.world_size != parallel.world_size:
        met.cache.close(flush=False)
        raise ConfigError(
            f"torch.distributed has {met.cache.world_size} ranks and the engine"
            f" {parallel.world_size}; LockstepConnector needs one engine for all ranks"
        )
    watch(met.cache, parsed.metrics_port)
    if met.cache.rank == 0:
        pages = met.cache.inspection.config.host_pages
        log.info(
            "Lockstep keeps %d ranks alike: %.2f GiB on each for %d host pages of %d tokens, %s,"
            " pipeline depth %d, rounds over %s",
            met.cache.world_size,
            pages * shard.page_bytes / 2**30,
            pages,
            engine.layout.page_tokens,
            f"store {without_secrets(parsed.store)}" if parsed.store else "no store",
            parsed.pipeline_depth,
            met.cache.stats().transport,
        )
    return SchedulerSide(
        met.cache,
        # Records of their own: no request waits while another engine reads the weights of a model.
        Adapters(FileDigests(records / "adapters.json", log=log), parsed.adapter_versions, log=log),
        page_tokens=engine.layout.page_tokens,
        loads=transfer.is_kv_consumer,
        backs_up=transfer.is_kv_producer,
        idle_wait_s=parsed.idle_wait_s,
    )
