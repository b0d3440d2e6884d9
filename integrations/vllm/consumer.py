"""Decode side of disaggregated prefill: how long requests wait for another engine's pages.

If pages are missing, the decode engine requests them again from the prefill engine, for a limited
agreed time. Then it prefetches from the store. Finally it computes the remaining tokens.
"""

import logging
from dataclasses import dataclass

from ...errors import UsageError
from ...ranks.group.host_cache import HostCache
from ...storage_backends.error_log import LoggedError
from .transfer_params import Handoff

log = logging.getLogger(__name__)

FRESH = 2
"""Number of the agreed time, counted from the start of a wait, at which the time limit begins.

The first agreed time may be old, because an idle group has the agreed time of its last step.
"""


@dataclass(slots=True, eq=False)
class AwaitedRequest:
    """A request that waits for pages of a prompt that another engine has computed."""

    handoff: Handoff
    times: int = 0
    """Number of distinct agreed times since the request began to wait, as recorded by `waits`."""
    last_ms: int = 0
    """The last recorded agreed time, in milliseconds."""
    since_ms: int = 0
    """The agreed time at which the number of found tokens last grew, in milliseconds."""
    found: int = 0
    """Number of the prompt's tokens that prefetches had found by the agreed time `since_ms`."""
    given_up: bool = False
    """Whether the request no longer tries to read from the other engine."""

    @property
    def source(self) -> str:
        """URI from which the request's next prefetch reads; empty means this engine's own store."""
        return "" if self.given_up else self.handoff.source


class PrefillConsumer:
    """Decides how long requests wait for pages that another engine has computed."""

    def __init__(self, cache: HostCache, patience_s: float, *, loads: bool) -> None:
        """Set `patience_s`, the maximum seconds that a request waits for promised pages.

        If `loads` is False, this engine does not load pages, so its requests never wait.
        """
        self._cache = cache
        self._loads = loads
        self._logged_reasons: set[str] = set()
        self._useless = LoggedError(log)
        self._patience_ms = patience_s * 1000

    def arrived(self, params: object) -> AwaitedRequest | None:
        """Return the waiting state of a new request; None if no other engine has computed its prompt.

        Invalid parameters are logged; this engine then computes the request's whole prompt.
        """
        try:
            handoff = Handoff.read(params)
        except UsageError as error:
            self._useless.warn(
                "a request's kv_transfer_params are invalid, so it is computed: %s", error
            )
            return None
        if handoff is None or not handoff.tokens:
            return None
        why = self._nothing_to_take(handoff)
        if why and why not in self._logged_reasons:
            self._logged_reasons.add(why)
            where = handoff.source or "a store"
            log.warning("a request's pages cannot be read from %s: %s", where, why)
        return None if why else AwaitedRequest(handoff)

    def waits(self, taken: AwaitedRequest) -> None:
        """Record that a request waits at the current agreed time.

        Call it in each pass that queries the request.
        """
        now_ms = self._cache.inspection.agreed_ms
        if taken.last_ms == now_ms:
            return
        taken.last_ms = now_ms
        taken.times += 1
        if taken.times <= FRESH:
            taken.since_ms = now_ms

    def prefetches_again(
        self, taken: AwaitedRequest, found: int, at_most: int, *, refused: bool
    ) -> bool:
        """Return whether a request should prefetch again and wait.

        Call it after each prefetch of the request. The prefetch has found `found` of at most `at_most`
        tokens. The time limit runs as long as prefetches find no additional tokens. After the time
        limit, or if the other engine has `refused` the request, at most one more prefetch follows, from
        this engine's own store.
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
            "of %d tokens promised by %s, %d have arrived; the rest is computed",
            taken.handoff.tokens,
            taken.handoff.source or "another engine",
            found,
        )
        return bool(taken.handoff.source) and self._cache.config.store is not None

    def _nothing_to_take(self, handoff: Handoff) -> str:
        """Return the reason why promised pages cannot be read; "" if they can be read."""
        config = self._cache.config
        if not self._loads:
            return "kv_role is kv_producer, so this engine loads nothing"
        if handoff.source and config.peers is None:
            return "set `peers` in kv_connector_extra_config"
        if handoff.source and config.peers is not None and config.peers.excludes(handoff.source):
            return "it is not in allow_sources of `peers`"
        if not handoff.source and config.store is None:
            return "set the same store, or `peers`, in kv_connector_extra_config of both engines"
        return ""
