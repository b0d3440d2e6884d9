"""Handoff of requests from a producer group, which serves their pages, to a consumer group.

The producer serves a finished request's pages, and sends its tokens and address to the consumer. The
consumer prefetches the available pages from there and computes the rest.
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
"""The maximum number of requests that wait for the consumer; the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class HandedRequest:
    """A finished request as the consumer receives it."""

    namespace: str
    tokens: bytes
    source: str
    """The address at which the producer serves its pages."""


@dataclass(slots=True)
class GroupHandoff:
    """The queue between the producer's and the consumer's engines."""

    random: Random
    page_tokens: int
    coverage: Counter[str]
    waiting: list[HandedRequest] = field(default_factory=list[HandedRequest])
    """Requests sent by the producer that the consumer has not yet taken."""

    def stays(self, caches: Sequence[RankCache], request: EngineRequest) -> bool:
        """Serve a finished request; return whether it stays so that others can read it."""
        random = self.random
        if request.name not in caches[0].inspection.requests:
            # The cache may not know a prompt of less than a page.
            return False
        if random.random() < (0.03 if request.is_handed_over else 0.02):
            return False
        if request.is_handed_over and random.random() < 0.7:
            # The handed-over request's TTL may expire before it is served again.
            return True
        request.is_served = True
        tokens, ttl_s = request.head(request.computed), random.choice((0.1, 1.0, 30.0))
        found = ask("match", caches, lambda c: c.match(tokens, request.namespace))
        end = request.head(found.host_tokens)
        told = ask("serve", caches, lambda c: c.serve(request.name, end, ttl_s=ttl_s))
        if told % self.page_tokens or not 0 <= told <= found.host_tokens:
            raise Violated(f"a serve of {found.host_tokens} tokens says {told}")
        # Hand over usually once all tokens can be read, rarely before.
        is_whole = 0 < told == found.host_tokens
        if not request.is_handed_over and random.random() < (0.7 if is_whole else 0.04):
            request.is_handed_over = True
            self.waiting.append(HandedRequest(request.namespace, tokens, caches[0].serving_uri))
            del self.waiting[:-_WAITING_MAX]
            self.coverage["handed over"] += 1
        return True

    def take(self) -> HandedRequest | None:
        """Return a request for the consumer, usually the newest; None if none waits."""
        if not self.waiting:
            return None
        self.coverage["taken over"] += 1
        return self.waiting.pop(-1 if self.random.random() < 0.7 else 0)
