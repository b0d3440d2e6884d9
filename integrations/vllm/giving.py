"""Requests whose prompts were computed here, for engines that go on with them.

Their answer has left by the time their last pages are on the host: what it promises is served as soon
as every rank has it. What is not there when all copies have ended never comes, and is computed there.
Where host memory may keep no more, what was served longest gives way: whoever goes on with it has
mostly read it within a moment.
"""

import logging
from collections import deque
from dataclasses import dataclass

from ...ranks.group.host_cache import HostCache
from .contract import VllmRequest
from .taking import FRESH
from .tracked import TrackedRequest
from .transfer_params import Handoff, goes_elsewhere

log = logging.getLogger(__name__)

ROOM_STEPS = 4
"""In so many steps what gives way has mostly left, so that there is room for what comes."""


@dataclass(slots=True, eq=False)
class _Given:
    """One such request, of which more is to come."""

    tracked: TrackedRequest
    served: int = 0
    """How often it was served since its copies have ended, or since something gave way to it."""


class Giving:
    """Serves requests that have ended, each for a while, out of the host memory of all ranks."""

    def __init__(self, cache: HostCache, ttl_s: float, *, has_states: bool, backs_up: bool) -> None:
        """Each is served for `ttl_s` of agreed time, unless there is nothing but a store to do so.

        With `has_states` others can go on only where a state was kept. An engine that does not back up
        has nothing to give.
        """
        self._cache = cache
        self._ttl_s = ttl_s
        self._backs_up = backs_up
        self._has_states = has_states
        self._coming: dict[str, _Given] = {}
        """Those of which copies bring more, by name."""
        self._served: deque[tuple[int, str]] = deque()
        """All others, and until when in agreed time; the first ones end first."""
        self._told: set[str] = set()

    def handoff(self, tracked: TrackedRequest, request: VllmRequest) -> Handoff | None:
        """Return what a request that ends is to be answered with; None if nobody goes on with it."""
        if not goes_elsewhere(request.kv_transfer_params):
            return None
        source = self._cache.serving_uri
        why = self._nothing_to_give(tracked, source)
        if why and why not in self._told:
            self._told.add(why)
            log.warning("a request is to go on in another engine, which will compute it: %s", why)
        tokens = 0 if why else self._promised(tracked)
        return Handoff(source, tokens) if tokens else None

    def begin(self, tracked: TrackedRequest) -> None:
        """Serve a request that has ended. It is not to be released before `over` names it."""
        self._coming[tracked.name] = _Given(tracked)

    @property
    def waits(self) -> bool:
        """Whether steps bring more of what was promised, since copies are under way."""
        return bool(self._coming)

    def serve(self) -> bool:
        """Serve what has come to host memory by now, once in each step; say whether that is all."""
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
        """Return the requests whose time is over, which are not served any more."""
        now_ms = self._cache.inspection.agreed_ms
        over: list[str] = []
        while self._served and now_ms > self._served[0][0]:
            over.append(self._served.popleft()[1])
        return over

    def _nothing_to_give(self, tracked: TrackedRequest, source: str) -> str:
        """Return why no other engine can have what a request has computed; empty if one can."""
        if not self._backs_up:
            return "kv_role is kv_consumer, and such an engine saves nothing"
        if not source and self._cache.config.store is None:
            return "set `peers`, or a store, in kv_connector_extra_config of both"
        if tracked.is_of_no_other_engine:
            return "the connector was reset, and nobody has said which weights there are since then"
        return ""

    def _promised(self, tracked: TrackedRequest) -> int:
        """Return after how many tokens of a request's prompt another engine will be able to go on."""
        unit = tracked.page_tokens
        tokens = min(tracked.lent_pages * unit, tracked.loadable_elsewhere)
        if not self._has_states:
            return tokens
        there = self._cache.match(tracked.head(tokens), tracked.namespace).host_tokens
        return max(tracked.state_pages * unit, there)
