"""How a group comes to take requests: by an inbox that all ranks have, and a socket of rank 0."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ....coordinator.bootstrap import agree_that_all_are_ready
from ....coordinator.collective import Collective
from ....errors import ConfigError
from ...executor.base import Executor
from ...protocol.config import CacheConfig
from ...protocol.outside import Control
from ..member.messages import Inbox
from ..member.rank_cache import RankCache
from .answering import Answering
from .group_control import GroupControl
from .inbox import OpenInbox, open_inbox
from .leading_inbox import LeadingInbox
from .port import ControlPort

CacheT = TypeVar("CacheT", bound=RankCache)


class OpenControl:
    """One rank's part in taking requests, before there is a cache that obeys them."""

    def __init__(self, settings: Control, inbox: Inbox, *, own: OpenInbox | None) -> None:
        """`own` is `inbox` where that was opened for control alone."""
        self.inbox = inbox
        self._settings = settings
        self._own = own
        self._port: ControlPort | None = None

    def listen(self) -> str | None:
        """Have rank 0 listen; return what is in the way."""
        if not isinstance(self.inbox, LeadingInbox):
            return None
        try:
            self._port = ControlPort(Path(self._settings.path))
        except ConfigError as error:
            return str(error)
        return None

    def obeyed_by(self, cache: RankCache) -> None:
        """Let a cache, which was opened with `inbox`, carry out what is asked until it closes."""
        control = GroupControl(cache)
        if self._port is not None:
            assert isinstance(self.inbox, LeadingInbox)
            answering = Answering(control, self.inbox.submit, refused=self._settings.refused)
            self._port.serve(answering.answer)
        cache.at_close(control.close)
        cache.at_close(self.close)

    def close(self) -> None:
        """Take no requests any more. Idempotent."""
        if self._port is not None:
            self._port.close()
        if self._own is not None:
            self._own.close()


def controlled(
    make: Callable[[Inbox | None], CacheT],
    config: CacheConfig,
    collective: Collective,
    executor: Executor,
    inbox: Inbox | None,
) -> CacheT:
    """Return the cache that `make` makes with an inbox, which obeys an operator where that is set.

    Collective, as `open_control`; executor and collective are closed if there is no cache to have them.
    """
    if config.control is None:
        return make(inbox)
    try:
        opened = open_control(config.control, collective, config.timeouts.open_s, inbox)
    except BaseException:
        executor.close()
        collective.close()
        raise
    cache = make(opened.inbox)
    opened.obeyed_by(cache)
    return cache


def open_control(
    settings: Control, collective: Collective, timeout_s: float, inbox: Inbox | None
) -> OpenControl:
    """Return this rank's part in taking requests; rank 0 listens at the socket.

    Collective: every rank calls it at the same point. They come by `inbox` where there is one, which
    must then be of `open_inbox`, and else by one of their own. Raises the same `ConfigError` on every
    rank where rank 0 cannot listen, or another cannot reach it.
    """
    own = None if inbox is not None else open_inbox(collective, timeout_s, host=settings.host)
    taken = own or inbox
    assert taken is not None
    opened = OpenControl(settings, taken, own=own)
    try:
        problem = opened.listen()
        if not collective.rank and not isinstance(taken, LeadingInbox):
            problem = "control needs an inbox that `open_inbox` has opened, or none"
        agree_that_all_are_ready(collective, problem, timeout_s)
    except BaseException:
        opened.close()
        raise
    return opened
