"""Operator commands to a serving cache: drop namespaces, change limits, and reset."""

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
    """Draws an operator's commands, which all ranks get."""

    def __init__(self, world: World) -> None:
        self.share = FAULT_PROFILES[world.fault_profile].controlled
        """The chance of a command per step."""
        self._resets = isinstance(world.config, CacheConfig)
        """An engine that owns the device pages resets the cache itself, together with its pages."""
        self._random = world.stream("controls")
        self.generation = 0
        """The number of operator resets of this epoch's caches."""

    def step(self, caches: Sequence[RankCache], requests: Sequence[EngineRequest]) -> str | None:
        """Give a command now and then; return its name or None."""
        random = self._random
        if random.random() >= self.share:
            return None
        if self._resets and random.random() < 0.1:
            return self._reset(caches, requests)
        return _drop(caches, random) if random.random() < 0.5 else _limit(caches, random)

    def _reset(self, caches: Sequence[RankCache], requests: Sequence[EngineRequest]) -> str:
        self.generation += 1
        # Contents depend on the generation, and so do keys of a named version.
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
