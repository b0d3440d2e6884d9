"""How a group comes to take requests: by a log that all ranks read, and a socket of rank 0."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ....coordinator.bootstrap import agree_that_all_are_ready
from ....coordinator.collective import Collective
from ....coordinator.collectives.in_process import MemoryStore
from ....errors import ConfigError
from ...executor.base import Executor
from ...protocol.config import CacheConfig
from ...protocol.outside import Control
from ..member.rank_cache import RankCache
from ..member.request_log import RequestLog
from .answering import Answering
from .group_control import GroupControl
from .port import ControlPort
from .stored_requests import StoredRequests

CacheT = TypeVar("CacheT", bound=RankCache)


def controlled(
    make: Callable[[RequestLog | None], CacheT],
    config: CacheConfig,
    collective: Collective,
    executor: Executor,
) -> CacheT:
    """Return the cache that `make` makes with a log, which obeys an operator where that is set.

    Collective: every rank calls it at the same point. Raises the same `ConfigError` on every rank where
    rank 0 cannot listen; executor and collective are closed if there is no cache to have them.
    """
    if config.control is None:
        return make(None)
    try:
        log, port = _opened(config.control, collective, config.timeouts.open_s)
    except BaseException:
        executor.close()
        collective.close()
        raise
    cache = make(log)
    _begin(cache, log, port, config.control.refused)
    return cache


def controlled_alone(make: Callable[[RequestLog | None], CacheT], config: CacheConfig) -> CacheT:
    """Return the cache that `make` makes where one process decides for all ranks; see `controlled`."""
    if config.control is None:
        return make(None)
    port, log = ControlPort(Path(config.control.path)), StoredRequests(MemoryStore({}))
    try:
        cache = make(log)
    except BaseException:
        port.close()
        raise
    _begin(cache, log, port, config.control.refused)
    return cache


def _begin(
    cache: RankCache, log: StoredRequests, port: ControlPort | None, refused: tuple[str, ...]
) -> None:
    """Let a cache carry out what is asked, and on rank 0 answer it, until it closes."""
    control = GroupControl(cache)
    cache.at_close(control.close)
    if port is not None:
        port.serve(Answering(control, log.submit, refused=refused).answer)
        cache.at_close(port.close)


def _opened(
    settings: Control, collective: Collective, timeout_s: float
) -> tuple[StoredRequests, ControlPort | None]:
    """Return the log of requests, and on rank 0 the socket at which they come in."""
    life = collective.gather(secrets.token_bytes(8), timeout_s)[0].hex()
    log = StoredRequests(collective.common_store(f"requests/{life}"))
    port: ControlPort | None = None
    problem: str | None = None
    if not collective.rank:
        try:
            port = ControlPort(Path(settings.path))
        except ConfigError as error:
            problem = str(error)
    try:
        agree_that_all_are_ready(collective, problem, timeout_s)
    except BaseException:
        if port is not None:
            port.close()
        raise
    return log, port
