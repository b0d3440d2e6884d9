"""Opens the cache for one vLLM engine, in both process layouts of vLLM.

- With a scheduler on every rank, each process has a whole cache.
- With one scheduler and many workers, each worker opens its rank and sends an opening message to the
  scheduler (`ranks.group.one_scheduler`).
"""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from vllm import __version__ as engine_version
from vllm import envs

from ...coordinator.collectives.torch_gloo import TorchCollective
from ...errors import ConfigError
from ...ranks.executor.engine_pages import EnginePages
from ...ranks.group.host_cache import HostCache
from ...ranks.group.one_scheduler.one_scheduler_opening import open_worker, require_pipelining
from ...ranks.group.one_scheduler.scheduler_cache import SchedulerCache, decide
from ...ranks.group.one_scheduler.worker import WorkerRank
from ...ranks.protocol.config import HostCacheConfig
from ...ranks.protocol.dispatch import OPENINGS
from ...telemetry.port import watch
from .. import releases
from ..weights import FileDigests
from . import rank_channel, start_line
from .adapters import adapter_weights
from .connector_settings import WHERE, ConnectorSettings, parse
from .contract import EngineCacheConfig, EngineConfig, ParallelConfig
from .engine_layout import EngineLayout, require_drafts_before_saves, require_supported
from .key_exclusions import RELEASES
from .kv_events import KVEvents
from .kv_identity import adapter_options, kv_identity, weights_of
from .lent_blocks import LentBlocks
from .request_identities import RequestIdentities
from .scheduler_side import SchedulerSide
from .weights import WEIGHTS_OF_THE_START, WeightsTracker

if TYPE_CHECKING:
    from .contract import TransferConfig

log = logging.getLogger(__name__)

_WITH_WORKERS_APART = ("mp", "ray")
"""Names of vLLM's executors that always run workers in processes without a scheduler."""


def has_one_scheduler_process(parallel: ParallelConfig) -> bool:
    """Return whether one scheduler process commands workers in other processes."""
    return parallel.distributed_executor_backend in _WITH_WORKERS_APART


def read_settings(config: EngineConfig) -> ConnectorSettings:
    """Return the settings; raise `ConfigError` for all errors found before KV is allocated."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    parsed = parse(transfer.kv_connector_extra_config)
    releases.require_release(
        "vLLM", engine_version, RELEASES, parsed.unsupported_engine, where=WHERE, log=log
    )
    require_supported(config)
    if has_one_scheduler_process(config.parallel_config):
        require_pipelining(parsed)
    else:
        require_drafts_before_saves(config, engine_version)
    return parsed


def open_beside_worker(
    config: EngineConfig,
    lending: LentBlocks,
    parsed: ConnectorSettings,
    engine_id: str,
    events: KVEvents | None,
) -> SchedulerSide:
    """Open this rank's cache over the KV tensors of this process's worker; a collective call."""
    parallel = config.parallel_config
    met = rank_channel.take(engine_id, parallel)
    settings, pages = _settings(config, met.cache_config, parsed, met.kv_caches)
    met.cache = HostCache.open(settings, pages, listener=None if events is None else events.listen)
    if met.cache.world_size != parallel.world_size:
        met.cache.close(flush=False)
        raise ConfigError(
            f"torch.distributed has {met.cache.world_size} ranks and the engine"
            f" {parallel.world_size}; LockstepConnector needs one engine for all ranks"
        )
    return _side(met.cache, config, lending, parsed, events)


def open_worker_rank(
    config: EngineConfig,
    cache_config: EngineCacheConfig,
    parsed: ConnectorSettings,
    kv_caches: dict[str, torch.Tensor],
    *,
    names_pages: bool,
) -> tuple[WorkerRank, bytes]:
    """Open one worker's rank, a collective call; return (rank, message to the scheduler).

    With `names_pages`, events have page keys.
    """
    settings, pages = _settings(config, cache_config, parsed, kv_caches)
    group = TorchCollective.create(timeout_s=settings.timeouts.open_s)
    return open_worker(settings, pages, group, names_pages=names_pages)


def open_for_workers(
    config: EngineConfig,
    lending: LentBlocks,
    parsed: ConnectorSettings,
    messages: Iterable[bytes],
    events: KVEvents | None,
) -> SchedulerSide:
    """Return the scheduler's side in one-scheduler mode; `messages` are the workers' openings."""
    cache = decide(
        map(OPENINGS.decode, messages), listener=None if events is None else events.listen
    )
    return _side(cache, config, lending, parsed, events)


def _settings(
    config: EngineConfig,
    cache_config: EngineCacheConfig,
    parsed: ConnectorSettings,
    kv_caches: dict[str, torch.Tensor],
) -> tuple[HostCacheConfig, dict[str, EnginePages]]:
    """Return (settings of a rank's cache, engine-owned device pages (lent) by pool).

    `cache_config` is the worker's own configuration, which has one KV specification per layer.
    """
    world_size = config.parallel_config.world_size
    layers = config.compilation_config.static_forward_context
    engine = EngineLayout.of(cache_config, world_size, kv_caches, layers)
    host_pages = parsed.host_pages_of(engine.host_bytes(1, world_size))
    weights = weights_of(config, parsed.weights_version, _digests(parsed, "weights"))
    environment = envs.compile_factors()
    kv = kv_identity(
        config,
        weights,
        {each.group.name: each.layout for each in engine.pools},
        share=parsed.share,
        engine_version=engine_version,
        environment=environment,
        given=[
            name for name in environment if name in envs.environment_variables and envs.is_set(name)
        ],
    )
    settings = HostCacheConfig(
        model=parsed.model or config.model_config.model,
        weights_version=kv,
        weights=weights,
        layout=engine.layout,
        components=engine.components(host_pages),
        host_pages=host_pages,
        populate_host=True,
        peers=parsed.peers,
        **parsed.for_cache(),
    )
    return settings, engine.lend(world_size)


def _digests(parsed: ConnectorSettings, of: str) -> FileDigests:
    records = Path(parsed.weight_digests or f"{envs.VLLM_CACHE_ROOT}/lockstep").expanduser()
    return FileDigests(records / f"{of}.json", log=log)


def _side(
    cache: HostCache,
    config: EngineConfig,
    lending: LentBlocks,
    parsed: ConnectorSettings,
    events: KVEvents | None,
) -> SchedulerSide:
    """Return the scheduler's side over an open cache."""
    transfer = cast("TransferConfig", config.kv_transfer_config)
    watch(cache, parsed.metrics_port)
    start_line.log_start_line(cache, log)
    encoders = config.ec_transfer_config
    adapters = adapter_weights(
        # Use separate record files for adapters and for models, because the record file of models
        # is locked while weights are read.
        _digests(parsed, "adapters"),
        parsed.adapter_versions,
        adapter_options(config, engine_version=engine_version),
    )
    return SchedulerSide(
        cache,
        RequestIdentities(
            cache, adapters, own_embeddings=encoders is None or not encoders.is_ec_consumer
        ),
        lending,
        parsed,
        weights=WeightsTracker(
            {WEIGHTS_OF_THE_START, parsed.weights_version or WEIGHTS_OF_THE_START},
            cache.inspection.config.life.hex(),
            parsed.weights_change,
            placed=None if events is None else partial(events.saw, cache),
        ),
        loads=transfer.is_kv_consumer,
        backs_up=transfer.is_kv_producer,
        # Allow extra steps only if the workers are in this process. Workers in other processes send
        # ballots only in vLLM's own steps.
        waits_in_pass=not isinstance(cache, SchedulerCache),
    )
