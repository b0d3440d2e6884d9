"""Requests that one group hands over to another: the producer serves them, the consumer goes on.

A producer serves what a request has computed when that has ended, and tells the consumer its tokens
and where to read. The consumer prefetches from there what it can, and computes the rest.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from ...ranks.group.member.rank_cache import RankCache
from ..rank.cluster import ask
from ..world.request import EngineRequest
from ..world.violated import Violated

_WAITING_MAX = 4
"""So many requests wait for the consumer at most; the one that came first is forgotten."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A request that has ended at the producer, as the consumer is told of it."""

    namespace: str
    tokens: bytes
    source: str
    """Where the producer serves it."""


@dataclass(slots=True)
class Handover:
    """The way from one group's engine to the other's."""

    random: Random
    page_tokens: int
    coverage: Counter[str]
    waiting: list[Handed] = field(default_factory=list[Handed])
    """Told by the producer, and not taken by the consumer yet."""

    def stays(self, caches: Sequence[RankCache], request: EngineRequest) -> bool:
        """Serve a request that has ended; say whether it is to stay, so that others can read it."""
        random = self.random
        if request.name not in caches[0].inspection.requests:
            # A prompt of less than a page may never have been told to the cache.
            return False
        if random.random() < (0.03 if request.is_handed_over else 0.02):
            return False
        if request.is_handed_over and random.random() < 0.7:
            # Its time may pass before it is served again.
            return True
        request.is_served = True
        tokens, ttl_s = request.head(request.computed), random.choice((0.1, 1.0, 30.0))
        found = ask("match", caches, lambda c: c.match(tokens, request.namespace))
        end = request.head(found.host_tokens)
        told = ask("serve", caches, lambda c: c.serve(request.name, end, ttl_s=ttl_s))
        if told % self.page_tokens or not 0 <= told <= found.host_tokens:
            raise Violated(f"a serve of {found.host_tokens} tokens says {told}")
        # Mostly once all of it can be read; an answer may also leave before that.
        is_whole = 0 < told == found.host_tokens
        if not request.is_handed_over and random.random() < (0.7 if is_whole else 0.04):
            request.is_handed_over = True
            self.waiting.append(Handed(request.namespace, tokens, caches[0].serving_uri))
            del self.waiting[:-_WAITING_MAX]
            self.coverage["handed over"] += 1
        return True

    def take(self) -> Handed | None:
        """Return a request with which the consumer goes on, mostly the last one; None if none waits."""
        if not self.waiting:
            return None
        self.coverage["taken over"] += 1
        return self.waiting.pop(-1 if self.random.random() < 0.7 else 0)
