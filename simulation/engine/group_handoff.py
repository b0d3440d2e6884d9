"""Handoff of requests from a simulated producer group to a consumer group.

The producer serves a finished request's pages, and sends the request's tokens and its own address to
the consumer. The consumer prefetches the available pages from this address and computes the rest.
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
"""Maximum number of requests that wait for the consumer; if more wait, the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class HandedRequest:
    """A finished request, in the form in which the consumer receives it."""

    namespace: str
    tokens: bytes
    source: str
    """The address at which the producer serves the request's pages."""


@dataclass(slots=True)
class GroupHandoff:
    """The queue of requests from the producer's engine to the consumer's engine."""

    random: Random
    page_tokens: int
    coverage: Counter[str]
    waiting: list[HandedRequest] = field(default_factory=list[HandedRequest])
    """Requests sent by the producer that the consumer has not yet taken."""

    def stays(self, caches: Sequence[RankCache], request: EngineRequest) -> bool:
        """Serve a finished request to the consumer; return whether the request is to be kept."""
        random = self.random
        if request.name not in caches[0].inspection.requests:
            # The cache does not know a request whose prompt is shorter than a page, so it cannot serve
            # it.
            return False
        if random.random() < (0.03 if request.is_handed_over else 0.02):
            return False
        if request.is_handed_over and random.random() < 0.7:
            # Keep the request, but do not serve it again, so that the TTL of its served pages can
            # expire.
            return True
        request.is_served = True
        tokens, ttl_s = request.head(request.computed), random.choice((0.1, 1.0, 30.0))
        found = ask("match", caches, lambda c: c.match(tokens, request.namespace))
        end = request.head(found.host_tokens)
        served = ask("serve", caches, lambda c: c.serve(request.name, end, ttl_s=ttl_s))
        if served % self.page_tokens or not 0 <= served <= found.host_tokens:
            raise Violated(f"a serve of {found.host_tokens} tokens says {served}")
        # Usually send the request once the consumer can read all its tokens; rarely send it earlier.
        is_whole = 0 < served == found.host_tokens
        if not request.is_handed_over and random.random() < (0.7 if is_whole else 0.04):
            request.is_handed_over = True
            self.waiting.append(HandedRequest(request.namespace, tokens, caches[0].serving_uri))
            del self.waiting[:-_WAITING_MAX]
            self.coverage["handed over"] += 1
        return True

    def take(self) -> HandedRequest | None:
        """Return a request for the consumer, usually the newest; None if the queue is empty."""
        if not self.waiting:
            return None
        self.coverage["taken over"] += 1
        return self.waiting.pop(-1 if self.random.random() < 0.7 else 0)
