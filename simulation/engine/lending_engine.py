"""Common base of the parts of a simulated engine that owns its device pages (over a `HostCache`)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from ...ranks.group.host_cache import HostCache
from ..world.request import EngineRequest
from .engine_pools import EnginePools

Answer = TypeVar("Answer")


class RequestCommand(Protocol):
    """Gives a command about a request to every rank, and returns their common answer."""

    def __call__(
        self, request: EngineRequest, what: str, command: Callable[[HostCache], Answer], /
    ) -> Answer: ...


@dataclass(slots=True)
class LendingEngine:
    """One part (loads, backups or retracts) of a simulated engine over a `HostCache`, for one epoch."""

    caches: Sequence[HostCache]
    pools: EnginePools
    page_tokens: int
    random: Random
    coverage: Counter[str]
    ask: RequestCommand
