"""How a cache comes to be: settings compared, memory and store made ready, on every rank or on none."""

import platform

import torch

from ..coordinator.bootstrap import Scalar, agree_on_settings, agree_that_all_are_ready, flatten
from ..coordinator.collectives.base import Collective
from ..errors import LockstepError
from ..storage_backends.claimed import ClaimedBackend
from ..storage_backends.namespace import Namespace
from ..storage_backends.registry import make_backend
from .cache import Cache
from .config import CacheConfig
from .executor.executor import RankExecutor
from .page_layout import ShardLayout
from .replica.state import ReplicaConfig

POOL_SIZES = ("device_pages", "host_pages")
"""The settings that may differ between ranks; the smallest is used."""


def open_cache(config: CacheConfig, collective: Collective, device: torch.device) -> Cache:
    """Make one rank's cache. Collective: every rank calls it at the same point.

    Raises the same `ConfigError` on every rank if settings differ or one rank cannot start. The
    collective is the cache's from now on, and is closed if there is no cache to give it to.
    """
    try:
        return _open(config, collective, device)
    except BaseException:
        collective.close()
        raise


def _open(config: CacheConfig, collective: Collective, device: torch.device) -> Cache:
    timeout_s = config.timeouts.round_s
    fields: dict[str, Scalar] = flatten(config)
    fields["world_size"] = collective.world_size
    smallest = {name: int(str(fields.pop(name))) for name in POOL_SIZES}
    agreed = agree_on_settings(collective, fields, smallest, timeout_s)
    hosts = collective.gather(platform.node().encode(), timeout_s)
    executor: RankExecutor | None = None
    problem: str | None = None
    try:
        shard = config.layout.shard(collective.rank, collective.world_size)
        ranks_on_host = hosts.count(hosts[collective.rank])
        executor = _executor(config, shard, device, agreed, ranks_on_host)
    except LockstepError as error:
        problem = str(error)
    try:
        agree_that_all_are_ready(collective, problem, timeout_s)
    except BaseException:
        if executor is not None:
            executor.close()
        raise
    assert executor is not None
    replica_config = ReplicaConfig.of(
        config,
        device_pages=agreed["device_pages"],
        host_pages=agreed["host_pages"],
        model_digest=bytes.fromhex(_namespace(config).digest()),
    )
    return Cache(config, collective, executor, replica_config, device_pool=executor.device_pool)


def _executor(
    config: CacheConfig,
    shard: ShardLayout,
    device: torch.device,
    agreed: dict[str, int],
    ranks_on_host: int,
) -> RankExecutor:
    backend = None
    if config.store is not None:
        backend = ClaimedBackend(
            make_backend(config.store),
            model=config.model,
            weights_version=config.weights_version,
            layout=config.layout,
        )
    return RankExecutor.create(
        config,
        shard,
        device,
        backend,
        _namespace(config).digest(),
        agreed["device_pages"],
        agreed["host_pages"],
        ranks_on_host=ranks_on_host,
    )


def _namespace(config: CacheConfig) -> Namespace:
    return Namespace(
        model=config.model, weights_version=config.weights_version, layout=config.layout
    )
