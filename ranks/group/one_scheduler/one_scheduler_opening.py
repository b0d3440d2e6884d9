"""Opening the workers of a group whose scheduler is in another process.

Workers open like the ranks of any group: they compare settings and agree on sizes, over a temporary
group of `torch.distributed`. Then each worker sends the result to the scheduler's process.
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
    """Raise `ConfigError` unless rounds are pipelined.

    The ballots of a step return to the scheduler with the step's outputs, so the scheduler cannot wait
    for a round within the step.
    """
    if settings.pipeline_depth != 1:
        raise ConfigError(
            "pipeline_depth is 0, must be 1 with one scheduler, because the ballots of a step return"
            " only with the step's outputs"
        )


def open_worker(
    config: HostCacheConfig,
    pages: Mapping[str, EnginePages],
    group: TorchCollective,
    *,
    names_pages: bool = False,
) -> tuple[WorkerRank, bytes]:
    """Open this worker's rank; return (rank, message): the rank, and an encoded `Opened` to send.

    The message is for the scheduler's process. Collective: every worker calls it at the same point.
    `pages` are the engine's device pages by pool name. `group` is closed on return. With `names_pages`
    the scheduler's events carry page keys. Raises the errors of `HostCache.open`, equally on every
    rank.
    """
    require_pipelining(config)
    try:
        executor, replica = open_rank(config, group, pages, names_pages=names_pages)
    finally:
        group.close()
    rank, world_size = group.rank, group.world_size
    shape = BallotShape(world_size=world_size, prefetch_slots=config.bounds.prefetches)
    opened = Opened(rank, world_size, config, replica, executor.serving_address())
    return WorkerRank(executor, shape, rank), OPENINGS.encode(opened)
