"""What every part has of an engine that lends its device pages to a `HostCache`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from ...ranks.host_cache import HostCache
from .engine_pools import EnginePools
from .request import EngineRequest

Answer = TypeVar("Answer")


class Ask(Protocol):
    """Gives every rank a command about a request, and returns the answer, the same on all."""

    def __call__(
        self, request: EngineRequest, what: str, command: Callable[[HostCache], Answer], /
    ) -> Answer:
        """See `Engine`."""
        ...


@dataclass(slots=True)
class Lending:
    """One part of the engine, in one epoch."""

    caches: Sequence[HostCache]
    pools: EnginePools
    page_tokens: int
    random: Random
    coverage: Counter[str]
    ask: Ask
