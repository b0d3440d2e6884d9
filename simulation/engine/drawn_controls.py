"""Simulated operator commands to a cache in use: drop namespaces, change limits, reset."""

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


class DrawnControls:
    """Draws operator commands, and gives each to all ranks."""

    def __init__(self, world: World) -> None:
        self.share = FAULT_PROFILES[world.fault_profile].controlled
        """The chance of an operator command per step."""
        self._resets = isinstance(world.config, CacheConfig)
        """Whether simulated operators reset the cache; false if the engine owns its device pages,
        because the engine then resets the cache itself."""
        self._random = world.stream("controls")
        self.generation = 0
        """The number of times that an operator has reset the caches in this epoch."""

    def step(self, caches: Sequence[RankCache], requests: Sequence[EngineRequest]) -> str | None:
        """Draw whether to give an operator command; return the command's name, or None if none."""
        random = self._random
        if random.random() >= self.share:
            return None
        if self._resets and random.random() < 0.1:
            return self._reset(caches, requests)
        return _drop(caches, random) if random.random() < 0.5 else _limit(caches, random)

    def _reset(self, caches: Sequence[RankCache], requests: Sequence[EngineRequest]) -> str:
        self.generation += 1
        # Put the generation (number of resets) into the weights' name: page contents differ between
        # generations, so page keys must differ, too.
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
