"""Serving of a simulated request's computed pages to other groups."""

from collections.abc import Sequence

from ...ranks.group.member.rank_cache import RankCache
from ..rank.cluster import ask
from ..world.request import EngineRequest
from ..world.violated import Violated
from ..world.world import World


class ServesPeers:
    """Draws which requests are served to other groups, and up to which token counts."""

    def __init__(self, world: World) -> None:
        self._random = world.stream("serving")
        self._page = world.page_tokens

    def serve(self, caches: Sequence[RankCache], request: EngineRequest, length: int) -> bool:
        """Draw whether to serve a request's first `length` tokens; return whether they are served."""
        if self._random.random() > 0.03:
            return False
        ttl_s = self._random.choice((0.05, 0.5, 30.0))
        # Serve several lengths of the request, as vLLM's producer does: first the full length, then
        # shorter ones.
        ends = [self._random.randint(0, length) for _ in range(self._random.choice((0, 1, 2, 3)))]
        for end in (length, *ends):
            self._serve(caches, request, end, ttl_s)
        return True

    def _serve(
        self, caches: Sequence[RankCache], request: EngineRequest, length: int, ttl_s: float
    ) -> None:
        tokens = request.head(length)
        served = ask("serve", caches, lambda c: c.serve(request.name, tokens, ttl_s=ttl_s))
        if served % self._page or not 0 <= served <= length:
            raise Violated(f"a serve of {length} tokens says {served}")
