"""Enables control requests: opens the log from which ranks read them, and rank 0's control socket."""

import secrets
from pathlib import Path
from typing import TypeVar

from ....coordinator.bootstrap import agree_that_all_are_ready
from ....coordinator.collective import Collective
from ....coordinator.collectives.in_process import MemoryStore
from ....errors import ConfigError
from ...protocol.network_config import Control
from ..member.rank_cache import RankCache
from .control_replies import ControlReplies
from .group_control import GroupControl
from .port import ControlPort
from .stored_requests import KEY_BYTES, StoredRequests

CacheT = TypeVar("CacheT", bound=RankCache)


def controlled(cache: CacheT, collective: Collective) -> CacheT:
    """Enable control requests on the cache if the settings say so; return the cache.

    Collective: every rank calls it at the same point. If rank 0 cannot listen, the cache is abandoned
    and the same `ConfigError` is raised on every rank.
    """
    control = cache.config.control
    if control is not None:
        try:
            log, port = _opened(control, collective, cache.config.timeouts.open_s)
        except BaseException:
            cache.abandon()
            raise
        _begin(cache, log, port, control.refused)
    return cache


def controlled_alone(cache: CacheT) -> CacheT:
    """Enable control requests in one-scheduler mode, in which only this process executes them."""
    control = cache.config.control
    if control is not None:
        try:
            port = ControlPort(Path(control.path))
        except BaseException:
            cache.abandon()
            raise
        _begin(cache, StoredRequests(MemoryStore({}), bytes(KEY_BYTES)), port, control.refused)
    return cache


def _begin(
    cache: RankCache, log: StoredRequests, port: ControlPort | None, refused: tuple[str, ...]
) -> None:
    """Connect the cache to the log of control requests and to the socket, until the cache closes."""
    cache.take_requests(log)
    control = GroupControl(cache)
    if port is not None:
        port.serve(ControlReplies(control, log.submit, refused=refused).answer)
        cache.at_close(port.close)
    # Close the socket before the log, so that no control request arrives at a closed log. Close
    # `GroupControl` last, because it sends an error to each client that still waits for a result.
    cache.at_close(log.close)
    cache.at_close(control.close)


def _opened(
    settings: Control, collective: Collective, timeout_s: float
) -> tuple[StoredRequests, ControlPort | None]:
    """Return (log, socket): the log of control requests, and the control socket on rank 0 or None."""
    # Rank 0 sends the encryption key over the ranks' own connections, because the key must not be in
    # the store that holds the encrypted control requests.
    drawn = collective.gather(secrets.token_bytes(8 + KEY_BYTES), timeout_s)[0]
    log = StoredRequests(collective.common_store(f"requests/{drawn[:8].hex()}"), drawn[8:])
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
