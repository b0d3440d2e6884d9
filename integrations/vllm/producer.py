"""Prefill side of disaggregated prefill: serves finished prompts to decode engines.

The response with the handoff promises pages that may not be in host memory yet. Promised pages are
served as soon as every rank has them. If a promised page never arrives, the decode engine computes it.
If host memory is full, the request that has been served longest is released, because decode engines
usually read within moments.
"""

import logging
from collections import deque
from dataclasses import dataclass

from ...ranks.group.host_cache import HostCache
from .consumer import FRESH
from .contract import VllmRequest
from .tracked import TrackedRequest
from .transfer_params import Handoff, goes_elsewhere

log = logging.getLogger(__name__)

ROOM_STEPS = 4
"""Usual number of steps from the release of a request until other requests can use its host pages."""


@dataclass(slots=True, eq=False)
class _Given:
    """A finished request whose pages are served; copies in flight may add pages."""

    tracked: TrackedRequest
    served: int = 0
    """Number of calls of `serve` since the request's copies finished. The count restarts at 0 when
    another request is released to free host memory for this request."""


class PrefillProducer:
    """Serves finished requests to other engines from all ranks' host memory, for a limited time."""

    def __init__(self, cache: HostCache, ttl_s: float, *, has_states: bool, backs_up: bool) -> None:
        """Serve each request for `ttl_s` seconds of agreed time.

        If `has_states` is True, another engine can continue only from a saved recurrent state. If
        `backs_up` is False, this engine has no pages in host memory to serve.
        """
        self._cache = cache
        self._ttl_s = ttl_s
        self._backs_up = backs_up
        self._has_states = has_states
        self._coming: dict[str, _Given] = {}
        """Maps names to requests with copies in flight, which may add pages to serve."""
        self._served: deque[tuple[int, str]] = deque()
        """(deadline in agreed milliseconds, name) of each request for which no more pages will arrive;
        earliest first."""
        self._logged_reasons: set[str] = set()

    def handoff(self, tracked: TrackedRequest, request: VllmRequest) -> Handoff | None:
        """Return the handoff for a finished request's response; None if no engine will continue it."""
        if not goes_elsewhere(request.kv_transfer_params):
            return None
        source = self._cache.serving_uri
        why = self._nothing_to_give(tracked, source)
        if why and why not in self._logged_reasons:
            self._logged_reasons.add(why)
            log.warning(
                "another engine will continue a request, but must compute its prompt: %s", why
            )
        tokens = 0 if why else self._promised(tracked)
        return Handoff(source, tokens) if tokens else None

    def begin(self, tracked: TrackedRequest) -> None:
        """Start to serve a finished request.

        The caller must not release the request before `over` has returned its name.
        """
        self._coming[tracked.name] = _Given(tracked)

    @property
    def waits(self) -> bool:
        """Whether copies in flight may still add promised pages, which further steps would serve."""
        return bool(self._coming)

    def serve(self) -> bool:
        """Serve pages that were backed up since the last step.

        Return True if no request can get more pages to serve.
        """
        for name, given in list(self._coming.items()):
            tracked, length = given.tracked, given.tracked.given
            copied = not self._cache.awaits_copies(name)
            if copied:
                length = self._cache.match(tracked.head(length), tracked.namespace).host_tokens
                given.served += 1
            served = self._cache.serve(name, tracked.head(length), ttl_s=self._ttl_s)
            if copied and served < length and self._served:
                self._cache.release(self._served.popleft()[1])
                given.served = 0
            if given.served >= (FRESH if served == length else ROOM_STEPS):
                until_ms = self._cache.inspection.agreed_ms + int(self._ttl_s * 1000)
                self._served.append((until_ms, name))
                del self._coming[name]
        return not self._coming

    def over(self) -> list[str]:
        """Return the names of requests that have been served for the whole serving time."""
        now_ms = self._cache.inspection.agreed_ms
        over: list[str] = []
        while self._served and now_ms > self._served[0][0]:
            over.append(self._served.popleft()[1])
        return over

    def _nothing_to_give(self, tracked: TrackedRequest, source: str) -> str:
        """Return the reason why no other engine can read a request's pages; "" if one can."""
        if not self._backs_up:
            return "kv_role is kv_consumer, so this engine saves nothing"
        if not source and self._cache.config.store is None:
            return "set `peers`, or a store, in kv_connector_extra_config of both engines"
        if tracked.is_local_only:
            return "the connector was reset, and the weights have not been named since then"
        return ""

    def _promised(self, tracked: TrackedRequest) -> int:
        """Return the number of a prompt's tokens that the next engine will not need to compute."""
        unit = tracked.page_tokens
        tokens = min(tracked.lent_pages * unit, tracked.loadable_elsewhere)
        if not self._has_states:
            return tokens
        there = self._cache.match(tracked.head(tokens), tracked.namespace).host_tokens
        return max(tracked.state_pages * unit, there)
