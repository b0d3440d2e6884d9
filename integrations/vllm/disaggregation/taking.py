"""Requests whose prompts another engine has computed: how long they wait for its pages, and where.

That engine has answered before all that it promises is to be had. So what is missing is asked for
again, for a while in agreed time; then the store is asked, and at last the request computes.
"""

import logging
from dataclasses import dataclass

from ....errors import UsageError
from ....ranks.host_cache import HostCache
from .handing_over import FRESH
from .transfer_params import Handoff

log = logging.getLogger("vllm.lockstep")


@dataclass(slots=True, eq=False)
class Taken:
    """What is remembered of one such request."""

    handoff: Handoff
    asked: int = 0
    """How often what has come was less than what was promised."""
    since_ms: int = 0
    """Since when, in agreed time."""
    given_up: bool = False
    """Whether the other engine is asked for no more."""

    @property
    def source(self) -> str:
        """Where its pages are read from now; empty for the store."""
        return "" if self.given_up else self.handoff.source


class Taking:
    """Decides what a request that another engine has computed waits for."""

    def __init__(self, cache: HostCache, patience_s: float) -> None:
        """A request waits for up to `patience_s` for what another engine has promised."""
        self._cache = cache
        self._patience_ms = patience_s * 1000

    def arrived(self, params: object) -> Taken | None:
        """Return what is to be remembered of a request that has arrived; None if it is like any other.

        What makes no sense is logged, and the request is computed.
        """
        try:
            handoff = Handoff.read(params)
        except UsageError as error:
            log.warning("a request's kv_transfer_params are no use, it is computed: %s", error)
            return None
        if handoff is None or not handoff.tokens:
            return None
        if handoff.source and self._cache.config.peers is None:
            log.warning(
                "a request's pages are to be read from %s: set `peers` in kv_connector_extra_config;"
                " its prompt is computed, or comes from the store",
                handoff.source,
            )
            return None
        return Taken(handoff)

    def asks_again(self, taken: Taken, found: int, at_most: int) -> bool:
        """Say whether a request that has `found` tokens is to ask for more of `at_most`, and to wait.

        To be asked when its prefetch has ended, and then again.
        """
        if taken.given_up or found >= min(taken.handoff.tokens, at_most):
            return False
        now_ms = self._cache.inspection.agreed_ms
        taken.asked += 1
        if taken.asked <= FRESH:
            taken.since_ms = now_ms
            return True
        if now_ms - taken.since_ms <= self._patience_ms:
            return True
        taken.given_up = True
        log.info(
            "of %d tokens that %s has promised, %d have come; the rest is computed",
            taken.handoff.tokens,
            taken.handoff.source or "another engine",
            found,
        )
        return bool(taken.handoff.source) and self._cache.config.store is not None
