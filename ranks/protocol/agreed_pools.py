"""The page pools of one rank: the configured layouts, with the sizes that all ranks agreed on."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...page_format.namespace import Namespace
from ...page_format.page_layout import PageLayout, ShardLayout
from .config import RankCacheConfig
from .orders import KV_POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPool:
    """One page pool of a rank: the layout of the rank's shard of a page, and the numbers of pages.

    The numbers of pages are equal on all ranks.
    """

    layout: ShardLayout
    device_pages: int
    """Number of device pages; 0 if the engine owns the device pages."""
    host_pages: int


def pool_layouts(config: RankCacheConfig) -> dict[str, PageLayout]:
    """Return the page layout of each pool by pool name, full attention first.

    Each layout is the model's full layout, including optional columns that this engine does not store.
    """
    return {KV_POOL: config.layout} | {each.pool: each.layout for each in config.components}


def namespace_of(config: RankCacheConfig) -> Namespace:
    """Return the facts (model, weights, layouts) in which caches must agree to share pages.

    The digest of these facts seeds every page key.
    """
    return Namespace(
        model=config.model,
        weights_version=config.weights_version,
        layouts=pool_layouts(config),
    )


def shard_layouts(config: RankCacheConfig, rank: int, world_size: int) -> dict[str, ShardLayout]:
    """Return, for each pool by name, the layout of the shard that `rank` stores of each page.

    Full attention comes first. Omits the columns that this engine does not store. Raises `ConfigError`
    if a layout cannot be sharded over `world_size` ranks.
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
    """Return the pools of `rank` by name, full attention first.

    `sizes` has, for each pool, the numbers of device and host pages that all ranks agreed on. Raises
    `ConfigError` if a layout cannot be sharded over `world_size` ranks.
    """
    return {
        pool: AgreedPool(layout=layout, device_pages=sizes[pool][0], host_pages=sizes[pool][1])
        for pool, layout in shard_layouts(config, rank, world_size).items()
    }
