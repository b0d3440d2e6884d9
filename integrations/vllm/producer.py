"""Producer side of disaggregated prefill: serve finished prompts to the engines that continue them.

The response with the handoff leaves before the last pages are in host memory. Promised pages are served
once every rank has them. The other engine computes pages that never arrive. If host memory is full, the
request served for longest is released, because consumers usually read within moments.
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
"""Number of steps within which released pages are usually freed for other requests."""


@dataclass(slots=True, eq=False)
class _Given:
    """A finished request that is being served while copies may add more pages."""

    tracked: TrackedRequest
    served: int = 0
    """Number of calls to `serve` since the copies finished or another request was released."""


class PrefillProducer:
    """Serves finished requests from the host memory of all ranks, each for a limited time."""

    def __init__(self, cache: HostCache, ttl_s: float, *, has_states: bool, backs_up: bool) -> None:
        """Serve each request for `ttl_s` seconds of agreed time.

        With `has_states`, other engines can continue only at a saved state. An engine that does not
        back up has nothing to serve.
        """
        self._cache = cache
        self._ttl_s = ttl_s
        self._backs_up = backs_up
        self._has_states = has_states
        self._coming: dict[str, _Given] = {}
        """Requests whose copies may add more pages, by name."""
        self._served: deque[tuple[int, str]] = deque()
        """Fully served requests with the end of their time in agreed milliseconds, earliest first."""
        self._told: set[str] = set()

    def handoff(self, tracked: TrackedRequest, request: VllmRequest) -> Handoff | None:
        """Return the handoff for a finished request's response; None if no other engine goes on."""
        if not goes_elsewhere(request.kv_transfer_params):
            return None
        source = self._cache.serving_uri
        why = self._nothing_to_give(tracked, source)
        if why and why not in self._told:
            self._told.add(why)
            log.warning(
                "another engine will continue a request, but must compute its prompt: %s", why
            )
        tokens = 0 if why else self._promised(tracked)
        return Handoff(source, tokens) if tokens else None

    def begin(self, tracked: TrackedRequest) -> None:
        """Serve a finished request. The caller must not release it before `over` returns its name."""
        self._coming[tracked.name] = _Given(tracked)

    @property
    def waits(self) -> bool:
        """Whether further steps serve more promised pages, because copies are in flight."""
        return bool(self._coming)

    def serve(self) -> bool:
        """Serve newly backed-up pages, once per step; return whether no request waits for more."""
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
        """Return the requests whose serving time is over."""
        now_ms = self._cache.inspection.agreed_ms
        over: list[str] = []
        while self._served and now_ms > self._served[0][0]:
            over.append(self._served.popleft()[1])
        return over

    def _nothing_to_give(self, tracked: TrackedRequest, source: str) -> str:
        """Return why no other engine can read a request's pages; empty if one can."""
        if not self._backs_up:
            return "kv_role is kv_consumer, so this engine saves nothing"
        if not source and self._cache.config.store is None:
            return "set `peers`, or a store, in kv_connector_extra_config of both engines"
        if tracked.is_local_only:
            return "the connector was reset, and the weights have not been named since then"
        return ""

    def _promised(self, tracked: TrackedRequest) -> int:
        """Return the number of prompt tokens after which another engine will be able to continue."""
        unit = tracked.page_tokens
        tokens = min(tracked.lent_pages * unit, tracked.loadable_elsewhere)
        if not self._has_states:
            return tokens
        there = self._cache.match(tracked.head(tokens), tracked.namespace).host_tokens
        return max(tracked.state_pages * unit, there)
