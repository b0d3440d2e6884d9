"""Opens Lockstep below one rank's SGLang tree; called by the constructor of the rank's scheduler."""

import logging
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from ...errors import ConfigError
from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.config import ComponentConfig, HostCacheConfig, Recurrent, SlidingWindow
from ...ranks.protocol.orders import KV_POOL
from ...storage_backends.uri import without_secrets
from ...telemetry.port import watch
from .engine.sglang_settings import DevicePoolSize, SglangSettings
from .host_tier import HostTier
from .identity.identity import Identity
from .namespaces import Namespaces
from .pools.engine_layout import SglangPool, engine_pools
from .pools.slots import WINDOW_POOL, AttentionSlots, WindowSlots
from .pools.state_slots import STATE_POOL, StateSlots
from .radix_cache import LockstepRadixCache
from .refusals import read_settings
from .weights import WeightsVersions

log = logging.getLogger(__name__)


def open_radix_cache(ctx: TreeCacheBuildContext) -> LockstepRadixCache:
    """Return this rank's radix tree with Lockstep below it. Every rank must call this."""
    settings = read_settings(ctx.server_args, get_memory(), sglang.__version__)
    params = ctx.params
    allocator = params.token_to_kv_pool_allocator
    pools = engine_pools(allocator.get_kvcache(), params.page_size, ctx.tp_size)
    if ctx.is_hybrid_ssm and STATE_POOL not in pools:
        raise ConfigError(
            "the model has a recurrent state and its KV in a"
            f" {type(allocator.get_kvcache()).__name__}; Lockstep supports a state with full attention;"
            " run without --radix-cache-backend"
        )
    identity = Identity(settings.plugin, ctx.model_config)
    host = _open_host(ctx, settings, pools, identity)
    components = [ComponentType.FULL]
    slots = AttentionSlots(allocator, params.page_size)
    if WINDOW_POOL in pools:
        components.append(ComponentType.SWA)
        slots = WindowSlots(allocator, params.page_size)
    if STATE_POOL in pools:
        components.append(ComponentType.MAMBA)
        slots = StateSlots(allocator, params.req_to_token_pool, params.page_size)
    # Create the tree here, because SGLang's `create_unified_radix_cache` would also create HiCache.
    params.tree_components = tuple(components)
    device = torch.device(allocator.device)
    namespaces = Namespaces(host, identity.adapters(ctx.tp_worker), page_tokens=params.page_size)
    namespaces.look()
    below = HostTier(
        host=host,
        slots=slots,
        namespaces=namespaces,
        weights=WeightsVersions(host, namespaces, identity.weights, identity.of_update),
        write_policy=settings.flags.hicache_write_policy,
        prefetch_threshold_tokens=settings.plugin.prefetch_threshold,
        idle_wait_s=settings.plugin.idle_wait_s,
        compare_batches=settings.plugin.compare_batches,
        stream=ctx.tp_worker.model_runner.forward_stream if device.type == "cuda" else None,
    )
    return LockstepRadixCache(params, below)


def _open_host(
    ctx: TreeCacheBuildContext,
    settings: SglangSettings,
    pools: dict[str, SglangPool],
    identity: Identity,
) -> HostCache:
    plugin = settings.plugin
    shards = {name: pool.layout.shard(ctx.tp_rank, ctx.tp_size) for name, pool in pools.items()}
    sizes = settings.host_pages(
        {
            name: DevicePoolSize(device_pages=pool.device_pages, page_bytes=shards[name].page_bytes)
            for name, pool in pools.items()
        },
        KV_POOL,
    )
    host = HostCache.open(
        HostCacheConfig(
            model=plugin.model or ctx.model_config.model_path,
            weights_version=identity.of_kv({name: pool.layout for name, pool in pools.items()}),
            weights=identity.weights,
            layout=pools[KV_POOL].layout,
            components=_components(ctx.params, pools, sizes),
            host_pages=sizes[KV_POOL],
            populate_host=True,
            **plugin.for_cache(),
        ),
        {name: pool.lend(ctx.tp_rank, ctx.tp_size) for name, pool in pools.items()},
    )
    if (host.rank, host.world_size) != (ctx.tp_rank, ctx.tp_size):
        host.close(flush=False)
        raise ConfigError(
            f"this is rank {host.rank} of {host.world_size} of torch.distributed and rank {ctx.tp_rank}"
            f" of {ctx.tp_size} of the TP group; Lockstep needs one TP group of all ranks"
        )
    watch(host, plugin.metrics_port)
    if host.rank == 0:
        _log_start(
            host, settings, {name: sizes[name] * each.page_bytes for name, each in shards.items()}
        )
    return host


def _components(
    params: Any, pools: dict[str, SglangPool], sizes: dict[str, int]
) -> tuple[ComponentConfig, ...]:
    found = list[ComponentConfig]()
    if WINDOW_POOL in pools:
        window = SlidingWindow(
            pool=WINDOW_POOL,
            # Use the number of window tokens that SGLang keeps. It is larger than the target model's
            # window if a draft model has a longer window.
            window_tokens=params.swa_retain_window,
            layout=pools[WINDOW_POOL].layout,
            host_pages=sizes[WINDOW_POOL],
        )
        found.append(window)
    if STATE_POOL in pools:
        state = Recurrent(
            pool=STATE_POOL,
            # Allow a recurrent state at every page boundary, because SGLang decides where it keeps
            # states.
            checkpoint_tokens=params.page_size,
            layout=pools[STATE_POOL].layout,
            host_pages=sizes[STATE_POOL],
        )
        found.append(state)
    return tuple(found)


def _log_start(host: HostCache, settings: SglangSettings, nbytes: dict[str, int]) -> None:
    store = settings.plugin.store
    log.info(
        "Lockstep under SGLang %s caches KV on %d ranks: %.2f GiB of host memory on each, %d host pages"
        " of %d tokens (%s), %s, %s, %s, pipeline depth %d, rounds over %s%s",
        sglang.__version__,
        host.world_size,
        sum(nbytes.values()) / 2**30,
        host.inspection.config.host_pages,
        host.config.layout.page_tokens,
        ", ".join(nbytes),
        f"store {without_secrets(store)}" if store else "no store",
        settings.flags.hicache_write_policy,
        host.config.stop_policy.rule,
        host.config.pipeline_depth,
        host.stats().transport,
        ", batches compared" if settings.plugin.compare_batches else "",
    )
