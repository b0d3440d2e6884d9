"""Requests whose prompts another engine has computed: how long they wait for its pages, and where.

That engine has answered before all that it promises is to be had. So what is missing is asked for
again, for a while in agreed time; then the store is asked, and at last the request computes.
"""

import logging
from dataclasses import dataclass

from ...errors import UsageError
from ...ranks.group.host_cache import HostCache
from ...storage_backends.complaints import Trouble
from .transfer_params import Handoff

log = logging.getLogger(__name__)

FRESH = 2
"""After so many steps that have told the time it is that of now; a group that was idle has that of its
last step."""


@dataclass(slots=True, eq=False)
class Taken:
    """What is remembered of one such request."""

    handoff: Handoff
    times: int = 0
    """How many different agreed times there have been while it was asked for."""
    last_ms: int = 0
    """The last of them."""
    since_ms: int = 0
    """Since when, in agreed time, nothing more has come of it."""
    found: int = 0
    """How many of its tokens had come by then."""
    given_up: bool = False
    """Whether the other engine is asked for no more."""

    @property
    def source(self) -> str:
        """Where its pages are read from now; empty for the store."""
        return "" if self.given_up else self.handoff.source


class Taking:
    """Decides what a request that another engine has computed waits for."""

    def __init__(self, cache: HostCache, patience_s: float, *, loads: bool) -> None:
        """A request waits for up to `patience_s` for what another engine has promised.

        Not where the engine `loads` nothing.
        """
        self._cache = cache
        self._loads = loads
        self._told: set[str] = set()
        self._useless = Trouble(log)
        self._patience_ms = patience_s * 1000

    def arrived(self, params: object) -> Taken | None:
        """Return what is to be remembered of a request that has arrived; None if it is like any other.

        What makes no sense is logged, and the request is computed.
        """
        try:
            handoff = Handoff.read(params)
        except UsageError as error:
            self._useless.warn(
                "a request's kv_transfer_params are no use, it is computed: %s", error
            )
            return None
        if handoff is None or not handoff.tokens:
            return None
        why = self._nothing_to_take(handoff)
        if why and why not in self._told:
            self._told.add(why)
            where = handoff.source or "a store"
            log.warning("a request's pages are to be read from %s, and are not: %s", where, why)
        return None if why else Taken(handoff)

    def waits(self, taken: Taken) -> None:
        """Take note of the time while a request waits; to be called in each pass that asks for it."""
        now_ms = self._cache.inspection.agreed_ms
        if taken.last_ms == now_ms:
            return
        taken.last_ms = now_ms
        taken.times += 1
        if taken.times <= FRESH:
            taken.since_ms = now_ms

    def asks_again(self, taken: Taken, found: int, at_most: int, *, refused: bool) -> bool:
        """Say whether a request that has `found` tokens is to ask for more of `at_most`, and to wait.

        To be asked when its prefetch has ended, and then again. The time that its lookups have taken
        counts, unless they have brought something. An engine that has `refused` to be read from is not
        waited for.
        """
        if taken.given_up:
            return False
        now_ms = self._cache.inspection.agreed_ms
        if found > taken.found:
            taken.found, taken.since_ms = found, now_ms
        if found >= min(taken.handoff.tokens, at_most):
            taken.since_ms = now_ms
            return False
        is_early = taken.times <= FRESH or now_ms - taken.since_ms <= self._patience_ms
        if is_early and not refused:
            return True
        taken.given_up = True
        log.info(
            "of %d tokens that %s has promised, %d have come; the rest is computed",
            taken.handoff.tokens,
            taken.handoff.source or "another engine",
            found,
        )
        return bool(taken.handoff.source) and self._cache.config.store is not None

    def _nothing_to_take(self, handoff: Handoff) -> str:
        """Return why nothing of what another engine promises can be read; empty if it can."""
        config = self._cache.config
        if not self._loads:
            return "kv_role is kv_producer, and such an engine loads nothing"
        if handoff.source and config.peers is None:
            return "set `peers` in kv_connector_extra_config"
        if handoff.source and config.peers is not None and config.peers.excludes(handoff.source):
            return "it is none of allow_sources of `peers`"
        if not handoff.source and config.store is None:
            return "set the same store, or `peers`, in kv_connector_extra_config of both"
        return ""
