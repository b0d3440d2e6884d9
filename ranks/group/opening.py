"""Opening a rank's cache: compare settings, allocate memory, open the store, on all ranks or none."""

import logging
import platform
import re
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast
from urllib.parse import quote, urlencode

import torch

from ...coordinator.bootstrap import Scalar, agree_on_settings, agree_that_all_are_ready, flatten
from ...coordinator.collective import Collective
from ...coordinator.collectives.connecting import connect
from ...coordinator.collectives.torch_gloo import TorchCollective
from ...coordinator.lanes import BallotShape
from ...errors import ConfigError, LockstepError, StorageError
from ...page_format.page_layout import ShardPlace
from ...storage_backends.base import StorageBackend
from ...storage_backends.peer.transfer_engine import TransferEngine
from ...storage_backends.peer.wire import RANKS
from ...storage_backends.records.shardings import Shardings
from ...storage_backends.registry import is_built_in, known_schemes, make_backend
from ...storage_backends.uri import RANK, parse_uri, without_secrets
from ...storage_backends.wrappers.claimed import ClaimedBackend
from ...version import VERSION
from ..executor.engine_pages import EnginePages
from ..executor.executor import RankExecutor
from ..executor.host_memory import check_host_memory
from ..executor.storage_transfers import RankObjects
from ..executor.stores import StoreAccess
from ..executor.writers import EVERYTHING, WriterShare
from ..page_server.page_server import HostPageServer, ServerBounds
from ..protocol.agreed_pools import (
    AgreedPool,
    agreed_pools,
    namespace_of,
    pool_layouts,
)
from ..protocol.config import CacheConfig, HostCacheConfig, RankCacheConfig
from ..protocol.network_config import Peers
from ..protocol.orders import KV_POOL
from ..protocol.replica_config import ReplicaConfig
from ..protocol.timed_events import Timeline
from ..protocol.transfer_engine_settings import TransferEngineSettings

Lent = EnginePages | Mapping[str, EnginePages]
"""The engine's device pages by pool name. Without a mapping: those of the full-attention pool."""

_log = logging.getLogger(__name__)

_ENGINE_PAGES = "engine pages"
_PER_RANK = ("peers.address", "peers.reached_at", "peers.device")
"""Names of settings that may differ between ranks."""
_POOL_SIZE = re.compile(r"(components\[\d+\]\.)?(device|host)_pages")


def new_group(config: RankCacheConfig) -> Collective:
    """Create a group of all ranks with the configured transport.

    Collective over the ranks of `torch.distributed`. Raises `ConfigError` if `config` is no
    configuration.
    """
    if not isinstance(cast("object", config), RankCacheConfig):
        raise ConfigError(
            f"the configuration is {config!r:.100}, must be a CacheConfig or HostCacheConfig"
        )
    return connected(config, TorchCollective.create(timeout_s=_longest_s(config)))


def connected(config: RankCacheConfig, group: TorchCollective) -> Collective:
    """Connect the ranks of a group by the configured transport.

    Collective over `group`, which belongs to the transport afterwards (`connecting.connect`).
    """
    shape = BallotShape(world_size=group.world_size, prefetch_slots=config.bounds.prefetches)
    return connect(group, config.transport, lanes=shape.length, timeout_s=_longest_s(config))


def _longest_s(config: RankCacheConfig) -> float:
    # Give the gloo group the longer one of the timeouts of opening and of rounds, because it carries
    # both.
    return max(config.timeouts.round_s, config.timeouts.open_s)


def open_rank(
    config: RankCacheConfig,
    collective: Collective,
    device: torch.device | Lent,
    *,
    names_pages: bool = False,
    timeline: Timeline | None = None,
) -> tuple[RankExecutor, ReplicaConfig]:
    """Create the executor and the replica's settings of one rank.

    Collective: every rank calls it at the same point. If the cache owns its device pages, `device` is
    the torch device to allocate them on; otherwise `device` has the engine's pages. Raises the same
    `ConfigError` on every rank if settings differ or one rank cannot start. On success the caller's
    cache owns `collective`; on an error this function closes it.
    """
    lent = {KV_POOL: device} if isinstance(device, EnginePages) else device
    try:
        wanted = CacheConfig if isinstance(device, torch.device) else HostCacheConfig
        if not isinstance(config, wanted):
            raise ConfigError(
                f"a {wanted.__name__.removesuffix('Config')} needs a {wanted.__name__}, not a"
                f" {type(config).__name__}"
            )
        return _agree_and_open(
            config,
            collective,
            lent,
            names_pages=names_pages,
            timeline=timeline,
        )
    except BaseException:
        collective.close()
        raise


def _agree_and_open(
    config: RankCacheConfig,
    collective: Collective,
    device: torch.device | Mapping[str, EnginePages],
    *,
    names_pages: bool,
    timeline: Timeline | None,
) -> tuple[RankExecutor, ReplicaConfig]:
    timeout_s = config.timeouts.open_s
    lent: Mapping[str, EnginePages] = {} if isinstance(device, torch.device) else device
    mine = lent[KV_POOL].pages if KV_POOL in lent else 0
    sizes, engine_pages = _agree(config, collective, mine, timeout_s)
    pools = agreed_pools(config, sizes, collective.rank, collective.world_size)
    hosts = collective.gather(platform.node().encode(), timeout_s)
    # Check the free memory on every rank of a host before any rank allocates. Each check compares the
    # free memory with the need of all ranks of the host, so memory that a rank has already taken would
    # count twice.
    with _problems_shared(collective, timeout_s):
        check_host_memory(_host_bytes(pools, device), hosts.count(hosts[collective.rank]))
    executor: RankExecutor | None = None
    connect = partial(store_access, config, collective.rank, collective.world_size)
    connect_source = partial(source_access, config, collective.rank, collective.world_size)
    try:
        with _problems_shared(collective, timeout_s):
            executor = RankExecutor.create(
                config,
                pools,
                device,
                connect=connect,
                connect_source=connect_source,
                timeline=timeline,
            )
            server = _page_server(config, collective, executor)
        if server is not None:
            encoded_ranks = collective.gather(RANKS.encode(server.rank), timeout_s)
            server.open([RANKS.decode(each) for each in encoded_ranks])
    except BaseException:
        if executor is not None:
            executor.close()
        raise
    assert executor is not None
    replica_config = ReplicaConfig.of(
        config,
        pools=sizes,
        model_digest=bytes.fromhex(namespace_of(config).digest()),
        life=collective.gather(secrets.token_bytes(16), timeout_s)[0],
        engine_pages=engine_pages,
        names_pages=names_pages,
    )
    return executor, replica_config


def _agree(
    config: RankCacheConfig,
    collective: Collective,
    engine_pages: int,
    timeout_s: float,
) -> tuple[dict[str, tuple[int, int]], int]:
    """Compare the ranks' settings; return (pool sizes, number of engine-owned device pages).

    The pool sizes are the numbers of device and host pages of each pool, by name. Every number returned
    is the smallest over all ranks.
    """
    fields: dict[str, Scalar] = {
        name: value
        for name, value in flatten(config).items()
        if name not in _PER_RANK and _POOL_SIZE.fullmatch(name) is None
    }
    fields["world_size"] = collective.world_size
    fields["version"] = VERSION
    fields["owner of device pages"] = "cache" if isinstance(config, CacheConfig) else "engine"
    # Exclude pool sizes from the comparison, because they may differ between ranks. The smallest is
    # used.
    mine = config.pool_sizes()
    smallest = {
        f"{pool} {tier}": size for pool, pair in mine.items() for tier, size in enumerate(pair)
    }
    secret = "" if config.peers is None else config.peers.secret
    shown = partial(_shown, secret)
    found = agree_on_settings(
        collective, fields, {**smallest, _ENGINE_PAGES: engine_pages}, timeout_s, shown=shown
    )
    return {pool: (found[f"{pool} 0"], found[f"{pool} 1"]) for pool in mine}, found[_ENGINE_PAGES]


def _shown(secret: str, text: str) -> str:
    return "a secret" if secret and text == secret else without_secrets(text)


def _host_bytes(
    pools: Mapping[str, AgreedPool], device: torch.device | Mapping[str, EnginePages]
) -> int:
    """Return all pools' host memory in bytes, with cache-owned device pages if those are on the CPU."""
    counted = isinstance(device, torch.device) and device.type == "cpu"
    return sum(
        (pool.host_pages + (pool.device_pages if counted else 0)) * pool.layout.page_bytes
        for pool in pools.values()
    )


@contextmanager
def _problems_shared(collective: Collective, timeout_s: float) -> Generator[None]:
    """Raise the same error on every rank if the `with` block failed on one of them."""
    problem: str | None = None
    try:
        yield
    except LockstepError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is.
        problem = f"{type(error).__name__}: {error}"
    agree_that_all_are_ready(collective, problem, timeout_s)


def store_access(config: RankCacheConfig, rank: int, world_size: int, store: str) -> StoreAccess:
    """Return how a rank accesses a store that is opened at the start or attached later.

    `store` is the store's URI as given to all ranks. Raises `ConfigError` for an unknown scheme,
    wrapper or option. Does not contact the store, nor import its client.
    """
    uri = store.replace(RANK, str(rank))
    place = ShardPlace.of(rank, world_size, config.pipeline_stages)
    namespace = namespace_of(config).digest()
    return StoreAccess(
        kind=_kind(uri),
        make_backend=_maker(config, uri),
        namespace=namespace,
        writer=_writer(store, place),
        shardings=Shardings(place, pool_layouts(config), namespace, config.absent_columns),
    )


def source_access(config: RankCacheConfig, rank: int, world_size: int, source: str) -> StoreAccess:
    """Return how a rank reads from another group that serves its pages at the URI `source`.

    Raises `ConfigError` for an invalid URI, a source that is not allowed, or if `peers` is not set.
    """
    if config.peers is None or parse_uri(source).scheme != "peer":
        raise ConfigError(f"cannot read from a group at {source!r}; set peers, and use peer://")
    if config.peers.excludes(source):
        raise ConfigError(f"{source!r} is not an allowed source; see allow_sources of peers")
    options = _reading_options(config.peers)
    uri = f"{source}{'&' if '?' in source else '?'}{options}" if options else source
    place = ShardPlace.of(rank, world_size, config.pipeline_stages)
    namespace = namespace_of(config).digest()
    return StoreAccess(
        kind=_kind(uri),
        make_backend=partial(make_backend, uri),
        namespace=namespace,
        writer=EVERYTHING,
        shardings=Shardings(place, pool_layouts(config), namespace, config.absent_columns),
    )


def _reading_options(peers: Peers) -> str:
    """Return the options to append to a source's URI: secret, allowlist and transfer engine."""
    options = {"secret": peers.secret} if peers.secret else {}
    if peers.allow_sources:
        options["allow_sources"] = ",".join(peers.allow_sources)
    if peers.engine is not None:
        options |= {
            "transfer": peers.transfer,
            "protocol": peers.protocol,
            "device": peers.device,
            "insists": str(int(peers.insists)),
        }
    return urlencode(options, quote_via=quote)


def _page_server(
    config: RankCacheConfig, collective: Collective, executor: RankExecutor
) -> HostPageServer | None:
    """Create the server from which other groups read this rank's pages; None without `peers`."""
    if config.peers is None:
        return None
    place = ShardPlace.of(collective.rank, collective.world_size, config.pipeline_stages)
    namespace, peers = namespace_of(config).digest(), config.peers
    objects = RankObjects(
        pools=executor.host_pools,
        namespace=namespace,
        writer=EVERYTHING,
        shardings=Shardings(place, pool_layouts(config), namespace, config.absent_columns),
    )
    # Drop a stalled reader before `quiesce_s` has passed, because otherwise the pages that it reads
    # would be quarantined.
    bounds = ServerBounds()
    quiet_s = min(bounds.quiet_s, config.timeouts.quiesce_s / 2)
    server = HostPageServer(
        objects,
        peers.address,
        secret=peers.secret,
        reached_at=peers.reached_at,
        bounds=replace(bounds, quiet_s=quiet_s),
        make_engine=partial(_serving_engine, peers.engine),
    )
    executor.serve_with(server)
    return server


def _serving_engine(settings: TransferEngineSettings | None, host: str) -> TransferEngine | None:
    """Return the transfer engine by which readers access this rank's pages, or None for TCP only.

    Raises `ConfigError` if the transfer engine fails and the settings require one.
    """
    if settings is None:
        return None
    try:
        engine = TransferEngine(settings.protocol, settings.device, host)
    except StorageError as error:
        if settings.insists:
            raise ConfigError(
                f"the transfer engine that `peers` insists on failed: {error}"
            ) from error
        _log.warning("pages are served over connections only: %s", error)
        return None
    _log.warning(
        "pages are served by Mooncake's transfer engine at %s: it listens on every interface"
        " without a secret, so any process that reaches its ports can read and write host pages",
        engine.address,
    )
    return engine


def _kind(uri: str) -> str:
    parsed = parse_uri(uri)
    return "+".join([*parsed.wrappers, parsed.scheme])


def _maker(config: RankCacheConfig, uri: str) -> Callable[[], StorageBackend]:
    """Return a factory for a store's backend.

    A built-in backend is created now, so that an invalid URI is refused at once. A backend of another
    package is created when the factory is called, because its import and constructor may be slow.
    """
    scheme = parse_uri(uri).scheme
    if not is_built_in(scheme) and scheme in known_schemes():
        return partial(_backend, config, uri)
    backend = _backend(config, uri)
    return lambda: backend


def _backend(config: RankCacheConfig, uri: str) -> StorageBackend:
    return ClaimedBackend(
        make_backend(uri),
        model=config.model,
        weights_version=config.weights_version,
        layouts=pool_layouts(config),
        weights=config.weights,
        store=uri,
    )


def _writer(store: str, place: ShardPlace) -> WriterShare:
    """Return this rank's share of writing replicated pages, of which ranks hold equal copies."""
    if RANK in store:
        return EVERYTHING
    uri = parse_uri(store)
    if uri.scheme == "memory" and not uri.host:
        # Each rank must write every page, because a memory store without a host name is private to its
        # rank.
        return EVERYTHING
    return WriterShare(rank=place.tp_rank, world_size=place.tp_size)
