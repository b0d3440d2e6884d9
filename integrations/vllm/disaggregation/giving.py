"""Requests whose prompts were computed here, for engines that go on with them.

Their answer has left by the time their last pages are on the host: what it promises is served as soon
as every rank has it. What is not there when all copies have ended never comes, and is computed there.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ....ranks.host_cache import HostCache
from ..contract import VllmRequest
from ..tracked import TrackedRequest
from .handing_over import FRESH
from .transfer_params import Handoff, goes_elsewhere

log = logging.getLogger("vllm.lockstep")


@dataclass(slots=True, eq=False)
class _Given:
    """One such request."""

    tracked: TrackedRequest
    asked: int = 0
    """How often it was served."""
    until_ms: int = 0
    """When it is over, in agreed time."""
    copied: bool = False
    """Whether its copies had ended when it was served last."""
    whole: bool = False
    """Whether others can read all that there will ever be of it."""


class Giving:
    """Serves requests that have ended, each for a while, out of the host memory of all ranks."""

    def __init__(self, cache: HostCache, ttl_s: float) -> None:
        """Each is served for `ttl_s` of agreed time, unless there is nothing but a store to do so."""
        self._cache = cache
        self._ttl_s = ttl_s
        self._given: dict[str, _Given] = {}
        self._told = False

    def handoff(self, tracked: TrackedRequest, request: VllmRequest) -> Handoff | None:
        """Return what a request that ends is to be answered with; None if nobody goes on with it."""
        tokens = tracked.lent_pages * tracked.page_tokens
        if not goes_elsewhere(request.kv_transfer_params) or not tokens:
            return None
        source, store = self._cache.serving_uri, self._cache.config.store
        if not source and store is None:
            if not self._told:
                log.warning(
                    "a request is to go on in another engine, which cannot read what is computed here:"
                    " set `peers`, or a store, in kv_connector_extra_config of both"
                )
            self._told = True
            return None
        return Handoff(source, tokens)

    def begin(self, tracked: TrackedRequest) -> None:
        """Serve a request that has ended. It is not to be released before `over` names it."""
        self._given[tracked.name] = _Given(tracked)

    @property
    def waits(self) -> bool:
        """Whether steps bring more of what was promised, since copies are under way."""
        return any(not each.copied or each.asked < FRESH for each in self._given.values())

    def serve(self) -> None:
        """Serve what has come to host memory by now: once in each step."""
        for name, given in self._given.items():
            fresh = given.asked >= FRESH
            if given.whole and fresh:
                continue
            if not fresh:
                given.asked += 1
                given.until_ms = self._cache.inspection.agreed_ms + int(self._ttl_s * 1000)
            tracked = given.tracked
            promised = tracked.lent_pages * tracked.page_tokens
            given.copied = not self._cache.lends(name)
            length = promised
            if given.copied:
                length = self._cache.match(tracked.head(promised), tracked.namespace).host_tokens
            there = self._cache.serve(name, tracked.head(length), ttl_s=self._ttl_s, ends=True)
            given.whole = given.copied and there == length

    def copied(self, leaving: Iterable[str]) -> list[str]:
        """Return which of these are served, and lend the engine's blocks to no copy any more."""
        return [name for name in leaving if name in self._given and not self._cache.lends(name)]

    def over(self) -> list[str]:
        """Return the requests whose time is over, which are not served any more."""
        now_ms = self._cache.inspection.agreed_ms
        over = [name for name, given in self._given.items() if now_ms > given.until_ms]
        for name in over:
            del self._given[name]
        return over
