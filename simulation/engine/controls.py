"""What an operator does to a cache that serves: drops namespaces, limits them, and resets."""

from collections.abc import Sequence
from functools import partial
from random import Random

from ...ranks.group.member.rank_cache import RankCache
from ...ranks.protocol.config import CacheConfig
from ..rank.cluster import ask
from ..world.faults import FAULT_PROFILES
from ..world.policies import draw_limits
from ..world.request import EngineRequest
from ..world.world import World


class Controls:
    """Draws the requests of an operator, which all ranks get."""

    def __init__(self, world: World) -> None:
        self.share = FAULT_PROFILES[world.fault_profile].controlled
        """How often an operator asks for something."""
        self._resets = isinstance(world.config, CacheConfig)
        """An engine with pages of its own resets the cache itself, together with those."""
        self._random = world.stream("controls")
        self.generation = 0
        """How often the operator has reset this epoch's caches."""

    def step(self, caches: Sequence[RankCache], requests: Sequence[EngineRequest]) -> str | None:
        """Ask for something now and then; return what it was."""
        random = self._random
        if random.random() >= self.share:
            return None
        if self._resets and random.random() < 0.1:
            return self._reset(caches, requests)
        return _drop(caches, random) if random.random() < 0.5 else _limit(caches, random)

    def _reset(self, caches: Sequence[RankCache], requests: Sequence[EngineRequest]) -> str:
        self.generation += 1
        # Contents follow the generation, and so do the keys of one that is named.
        version = f"weights {self.generation}" if self.generation % 3 else None
        ask("reset", caches, lambda c: c.reset(version))
        for request in requests:
            request.cached_before = 0
        return "weights changed"


def _drop(caches: Sequence[RankCache], random: Random) -> str:
    namespace = random.choice((None, "", "tenant"))
    ask("drop", caches, lambda c: c.drop(namespace))
    return "drops"


def _limit(caches: Sequence[RankCache], random: Random) -> str:
    for limit in draw_limits(random):
        ask("limit", caches, partial(RankCache.limit, limit=limit))
    return "limits changed"
