"""How a cache comes to be: settings compared, memory and store made ready, on every rank or on none."""

import platform
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from .. import __version__
from ..coordinator.bootstrap import Scalar, agree_on_settings, agree_that_all_are_ready, flatten
from ..coordinator.collectives.base import Collective
from ..coordinator.collectives.torch_gloo import TorchCollective
from ..errors import LockstepError
from ..storage_backends.base import StorageBackend
from ..storage_backends.claimed import ClaimedBackend
from ..storage_backends.namespace import Namespace
from ..storage_backends.registry import make_backend
from .cache import Cache
from .config import CacheConfig
from .executor.engine_pages import EnginePages
from .executor.executor import RankExecutor
from .executor.host_memory import check_host_memory
from .executor.pools import DevicePages, DevicePool
from .host_cache import HostCache
from .page_layout import ShardLayout
from .replica.state import ReplicaConfig

POOL_SIZES = ("device_pages", "host_pages")
"""The settings that may differ between ranks; the smallest is used."""


def new_group(config: CacheConfig) -> Collective:
    """Return a new gloo group of all ranks of `torch.distributed`. Collective."""
    # Gloo's own bound must not end what the start is still allowed to wait for.
    longest_s = max(config.timeouts.round_s, config.timeouts.open_s)
    return TorchCollective.create(timeout_s=longest_s)


def open_cache(config: CacheConfig, collective: Collective, device: torch.device) -> Cache:
    """Make one rank's cache. Collective: every rank calls it at the same point.

    Raises the same `ConfigError` on every rank if settings differ or one rank cannot start. The
    collective is the cache's from now on, and is closed if there is no cache to give it to.
    """
    on_host = device.type == "cpu"

    def make(shard: ShardLayout, pages: int) -> DevicePool:
        return DevicePool(shard, pages, device)

    executor, replica_config = _open(config, collective, make, counts_as_host=on_host)
    return Cache(config, collective, executor, replica_config)


def open_host_cache(config: CacheConfig, collective: Collective, pages: EnginePages) -> HostCache:
    """Make one rank's cache under an engine's device pages; otherwise as `open_cache`."""
    executor, replica_config = _open(config, collective, lambda _, __: pages, counts_as_host=False)
    return HostCache(config, collective, executor, replica_config)


def _open(
    config: CacheConfig,
    collective: Collective,
    make_device: Callable[[ShardLayout, int], DevicePages],
    *,
    counts_as_host: bool,
) -> tuple[RankExecutor, ReplicaConfig]:
    """Open the executor; `counts_as_host` says that device pages are host memory of ours."""
    try:
        return _agree_and_open(config, collective, make_device, counts_as_host)
    except BaseException:
        collective.close()
        raise


def _agree_and_open(
    config: CacheConfig,
    collective: Collective,
    make_device: Callable[[ShardLayout, int], DevicePages],
    counts_as_host: bool,
) -> tuple[RankExecutor, ReplicaConfig]:
    timeout_s = config.timeouts.open_s
    fields: dict[str, Scalar] = flatten(config)
    fields["world_size"] = collective.world_size
    fields["version"] = __version__
    fields["owner of device pages"] = "cache" if config.device_pages else "engine"
    smallest = {name: int(str(fields.pop(name))) for name in POOL_SIZES}
    agreed = agree_on_settings(collective, fields, smallest, timeout_s)
    hosts = collective.gather(platform.node().encode(), timeout_s)
    shard = config.layout.shard(collective.rank, collective.world_size)
    pages = agreed["host_pages"] + (agreed["device_pages"] if counts_as_host else 0)
    # Memory is checked on every rank before any rank takes its share, which would count twice.
    with _problems_told(collective, timeout_s):
        check_host_memory(pages * shard.page_bytes, hosts.count(hosts[collective.rank]))
    executor: RankExecutor | None = None
    try:
        with _problems_told(collective, timeout_s):
            device = make_device(shard, agreed["device_pages"])
            backend = _backend(config, collective.rank)
            executor = RankExecutor.create(
                config, shard, device, backend, _namespace(config).digest(), agreed["host_pages"]
            )
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
        life=collective.gather(secrets.token_bytes(16), timeout_s)[0],
    )
    return executor, replica_config


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


def _backend(config: CacheConfig, rank: int) -> StorageBackend | None:
    if config.store is None:
        return None
    return ClaimedBackend(
        make_backend(config.store.replace("{rank}", str(rank))),
        model=config.model,
        weights_version=config.weights_version,
        layout=config.layout,
    )


def _namespace(config: CacheConfig) -> Namespace:
    return Namespace(
        model=config.model, weights_version=config.weights_version, layout=config.layout
    )
