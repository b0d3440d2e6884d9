"""The pools of one rank: those of a configuration, in the sizes that all ranks have agreed on."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...page_format.namespace import Namespace
from ...page_format.page_layout import PageLayout, ShardLayout
from .config import RankCacheConfig
from .orders import KV_POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPool:
    """One pool: this rank's part of its pages, and how many of them every rank has."""

    layout: ShardLayout
    device_pages: int
    """0 where the engine owns them."""
    host_pages: int


def pool_layouts(config: RankCacheConfig) -> dict[str, PageLayout]:
    """Return the layout of each pool by the pool's name, full attention's first.

    It is that of the model, whichever optional columns are kept here.
    """
    return {KV_POOL: config.layout} | {each.pool: each.layout for each in config.components}


def namespace_of(config: RankCacheConfig) -> Namespace:
    """Return what must agree before caches may share pages; every key begins with its digest."""
    return Namespace(
        model=config.model,
        weights_version=config.weights_version,
        layouts=pool_layouts(config),
    )


def shard_layouts(config: RankCacheConfig, rank: int, world_size: int) -> dict[str, ShardLayout]:
    """Return what `rank` keeps of a page of each pool, without the columns that are absent here.

    By the pool's name, full attention's first. Raises `ConfigError` if `world_size` ranks cannot
    divide a layout.
    """
    return {
        pool: layout.shard(
            rank, world_size, absent=config.absent_columns, stages=config.pipeline_stages
        )
        for pool, layout in pool_layouts(config).items()
    }


def agreed_pools(
    config: RankCacheConfig, sizes: Mapping[str, tuple[int, int]], rank: int, world_size: int
) -> dict[str, AgreedPool]:
    """Return the pools of `rank` by name, full attention's first.

    `sizes` has the pages on the device and on the host that were agreed on. Raises `ConfigError` if
    `world_size` ranks cannot divide a layout.
    """
    return {
        pool: AgreedPool(layout=layout, device_pages=sizes[pool][0], host_pages=sizes[pool][1])
        for pool, layout in shard_layouts(config, rank, world_size).items()
    }
