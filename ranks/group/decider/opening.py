"""Opening the ranks of a group whose decider is in another process.

The workers open as the ranks of any group do: they compare their settings among themselves and agree on
sizes, over a group of `torch.distributed` that serves for nothing else. Then each tells the decider.
"""

from collections.abc import Mapping

from ....coordinator.collectives.torch_gloo import TorchCollective
from ....coordinator.lanes import BallotShape
from ....errors import ConfigError
from ...executor.engine_pages import EnginePages
from ...protocol.config import GroupSettings, HostCacheConfig
from ...protocol.dispatch import OPENINGS, Opened
from ..opening import open_rank
from .worker import WorkerRank


def require_pipelining(settings: GroupSettings) -> None:
    """Raise `ConfigError` where a decider would have to wait for the round of its own step."""
    if settings.pipeline_depth != 1:
        raise ConfigError(
            "pipeline_depth is 0, and an engine with one scheduler brings the ballots of a step back"
            " only with its outputs; leave it at 1"
        )


def open_worker(
    config: HostCacheConfig,
    pages: Mapping[str, EnginePages],
    group: TorchCollective,
    *,
    names_pages: bool = False,
) -> tuple[WorkerRank, bytes]:
    """Return this worker's rank, and what the decider is to hear of it.

    Collective: every worker calls it at the same point. `pages` are the engine's, by pool. `group` is
    closed when this returns. With `names_pages` the decider's notices name pages. Raises
    as `HostCache.open` does, the same on every rank.
    """
    require_pipelining(config)
    try:
        executor, replica = open_rank(config, group, pages, names_pages=names_pages)
    finally:
        group.close()
    rank, world_size = group.rank, group.world_size
    shape = BallotShape(world_size=world_size, seats=config.bounds.prefetches)
    opened = Opened(rank, world_size, config, replica, executor.serving_address())
    return WorkerRank(executor, shape, rank), OPENINGS.encode(opened)
