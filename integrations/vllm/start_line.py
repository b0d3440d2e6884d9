"""The line in vLLM's log that describes the cache at start: layers, host capacity, bytes per token."""

import logging
from collections.abc import Iterator, Mapping

from ...page_format.page_layout import PageLayout
from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.config import RankCacheConfig, Recurrent
from ...ranks.protocol.orders import KV_POOL
from ...storage_backends.uri import without_secrets


def log_start_line(cache: HostCache, log: logging.Logger) -> None:
    """Log the start line on rank 0, once the cache is open."""
    if cache.rank:
        return
    agreed = cache.inspection.config
    pages = {
        KV_POOL: agreed.host_pages,
        **{each.pool: each.host_pages for each in agreed.components},
    }
    log.info(
        "%s", start_line(cache.config, pages, cache.world_size, cache.stats(rounds=0).transport)
    )


def start_line(
    config: RankCacheConfig, host_pages: Mapping[str, int], ranks: int, transport: str
) -> str:
    """Return the start line; `host_pages` has each pool's number of host pages, agreed by all ranks."""
    tokens = host_pages[KV_POOL] * config.layout.page_tokens
    held = sum(
        host_pages[pool] * _page_bytes(config, layout, ranks) for pool, layout in _layouts(config)
    )
    parts = [
        _part(config, pool, layout, host_pages[pool], ranks) for pool, layout in _layouts(config)
    ]
    store = f"store {without_secrets(config.store)}" if config.store else "no store"
    return (
        f"Lockstep caches {tokens} tokens in {held / 2**30:.2f} GiB of host memory on each of {ranks}"
        f" ranks: {'; '.join(parts)}; {store}, pipeline depth {config.pipeline_depth}, rounds over"
        f" {transport}"
    )


def _layouts(config: RankCacheConfig) -> Iterator[tuple[str, PageLayout]]:
    yield KV_POOL, config.layout
    for each in config.components:
        yield each.pool, each.layout


def _page_bytes(config: RankCacheConfig, layout: PageLayout, ranks: int) -> int:
    """Return one rank's bytes of a page; ranks differ only if their pipeline stages are unequal."""
    shard = layout.shard(0, ranks, absent=config.absent_columns, stages=config.pipeline_stages)
    return shard.page_bytes


def _part(config: RankCacheConfig, pool: str, layout: PageLayout, pages: int, ranks: int) -> str:
    """Return the part of the start line that describes one pool."""
    layers = max(each.layers for each in layout.columns)
    nbytes = _page_bytes(config, layout, ranks)
    kept = next((each for each in config.components if each.pool == pool), None)
    if isinstance(kept, Recurrent):
        return (
            f"{pool}: {layers} layers, {pages} states, one for {kept.checkpoint_tokens} tokens,"
            f" {nbytes} bytes each"
        )
    window = "" if kept is None else f", a window of {kept.window_tokens}"
    return (
        f"{pool}: {layers} layers{window}, {pages} pages of {layout.page_tokens} tokens,"
        f" {nbytes // layout.page_tokens} bytes a token"
    )
