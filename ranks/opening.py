"""How a cache comes to be: settings compared, memory and store made ready, on every rank or on none."""

import platform
from collections.abc import Generator
from contextlib import contextmanager

import torch

from .. import __version__
from ..coordinator.bootstrap import Scalar, agree_on_settings, agree_that_all_are_ready, flatten
from ..coordinator.collectives.base import Collective
from ..errors import LockstepError
from ..storage_backends.claimed import ClaimedBackend
from ..storage_backends.namespace import Namespace
from ..storage_backends.registry import make_backend
from .cache import Cache
from .config import CacheConfig
from .executor.executor import RankExecutor
from .executor.host_memory import check_host_memory
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
    timeout_s = config.timeouts.open_s
    fields: dict[str, Scalar] = flatten(config)
    fields["world_size"] = collective.world_size
    fields["version"] = __version__
    smallest = {name: int(str(fields.pop(name))) for name in POOL_SIZES}
    agreed = agree_on_settings(collective, fields, smallest, timeout_s)
    hosts = collective.gather(platform.node().encode(), timeout_s)
    shard = config.layout.shard(collective.rank, collective.world_size)
    # Memory is checked on every rank before any rank takes its share, which would count twice.
    with _problems_told(collective, timeout_s):
        check_host_memory(_host_bytes(shard, device, agreed), hosts.count(hosts[collective.rank]))
    executor: RankExecutor | None = None
    try:
        with _problems_told(collective, timeout_s):
            executor = _executor(config, shard, device, agreed)
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


@contextmanager
def _problems_told(collective: Collective, timeout_s: float) -> Generator[None]:
    """Tell the other ranks whether the block went well here; raise on all if it did not on one."""
    problem: str | None = None
    try:
        yield
    except LockstepError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is.
        problem = f"{type(error).__name__}: {error}"
    agree_that_all_are_ready(collective, problem, timeout_s)


def _host_bytes(shard: ShardLayout, device: torch.device, agreed: dict[str, int]) -> int:
    pages = agreed["host_pages"] + (agreed["device_pages"] if device.type == "cpu" else 0)
    return pages * shard.page_bytes


def _executor(
    config: CacheConfig, shard: ShardLayout, device: torch.device, agreed: dict[str, int]
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
    )


def _namespace(config: CacheConfig) -> Namespace:
    return Namespace(
        model=config.model, weights_version=config.weights_version, layout=config.layout
    )
