"""Pins of prefixes, and retraction and resumption of requests, for device pages owned by the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...ranks.group.cache import Cache
from ...ranks.protocol.answers import Admission, Wait
from ...ranks.replica.operations.requests import LoadState
from ..rank.cluster import ask
from ..world.faults import FAULT_PROFILES
from ..world.prompts import Prompts
from ..world.request import EngineRequest, EngineStage
from ..world.violated import not_kept
from ..world.world import World

PINS_MAX = 3


@dataclass(frozen=True, slots=True)
class _Pinned:
    name: str
    namespace: str
    tokens: bytes
    kept: int


class Pins:
    """Pins prefixes for a while, and checks that pinned prefixes stay cached."""

    def __init__(self, world: World) -> None:
        self._random = world.stream("pins")
        self._pins: list[_Pinned] = []
        self._named = 0

    def begin_epoch(self) -> None:
        """Forget all pins, because the group that had them has ended."""
        self._pins.clear()

    def step(self, caches: Sequence[Cache], prompts: Prompts) -> int:
        """Draw whether to pin or unpin a prefix; return the number of new pins (0 or 1)."""
        draw = self._random.random()
        if draw < 0.06 and len(self._pins) < PINS_MAX:
            return self._pin(caches, prompts)
        if draw > 0.94 and self._pins:
            self._unpin(caches, self._pins.pop(self._random.randrange(len(self._pins))))
        return 0

    def drain(self, caches: Sequence[Cache]) -> None:
        while self._pins:
            self._unpin(caches, self._pins.pop())

    def _pin(self, caches: Sequence[Cache], prompts: Prompts) -> int:
        self._named += 1
        name, ttl_s = f"p{self._named}", self._random.choice((0.05, 0.5, 30.0))
        namespace, tokens = prompts.earlier(self._random)
        kept = ask("pin", caches, lambda c: c.pin(name, tokens, namespace, ttl_s=ttl_s))
        if not kept:
            return 0
        self._pins.append(_Pinned(name, namespace, tokens, kept))
        return 1

    def _unpin(self, caches: Sequence[Cache], pin: _Pinned) -> None:
        found = ask("match", caches, lambda c: c.match(pin.tokens, pin.namespace))
        # If the pin's TTL has expired, `unpin` returns False, and the tokens need not be cached.
        if ask("unpin", caches, lambda c: c.unpin(pin.name)) and found.host_tokens < pin.kept:
            raise not_kept(pin.kept, "were pinned", found.host_tokens)


class Retracts:
    """Retracts requests to host memory, and resumes them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.stream("retract")
        self._share = FAULT_PROFILES[world.fault_profile].retracted
        self._page = world.page_tokens

    def strikes(self) -> bool:
        """Draw whether the engine retracts a request that computes."""
        return self._random.random() < self._share

    def retract(self, caches: Sequence[Cache], request: EngineRequest) -> bool:
        """Retract a request; return False if the host lacks free pages.

        A request that is not retracted continues. In both cases, the request's whole pages are shared
        with the prefix tree afterwards.
        """
        tokens = request.head(request.computed)
        done = ask("retract", caches, lambda c: c.retract(request.name, tokens))
        request.shared = request.computed // self._page * self._page
        if not done:
            return False
        request.came_from, request.stage = request.stage, EngineStage.RETRACTED
        request.room = 0
        request.tables.clear()
        return True

    def look(
        self,
        caches: Sequence[Cache],
        request: EngineRequest,
        resumed: Callable[[EngineRequest, Admission], None],
    ) -> str:
        """Return how a retraction ended, or "waits"; resume the request once its pages are saved."""
        state = ask("load_state", caches, lambda c: c.load_state(request.name))
        if state is LoadState.FAILED:
            return "failed"
        if state is not LoadState.SAVED or self._random.random() < 0.4:
            return "waits"
        reserve = request.computed + self._random.randint(0, 2 * self._page)
        if not self._world.may_fit(request.shared, reserve):
            reserve = request.computed
        answer = ask("resume", caches, lambda c: c.resume(request.name, reserve_tokens=reserve))
        if answer is Wait.LOST:
            return "lost"
        if isinstance(answer, Wait):
            request.refused += 1
            return "refused"
        if answer.cached_tokens != request.computed:
            why = f"were computed by request {request.name} when it was retracted"
            raise not_kept(request.computed, why, answer.cached_tokens)
        pages = max(-(-request.computed // self._page), -(-reserve // self._page))
        request.room = pages * self._page
        request.refused = 0
        resumed(request, answer)
        return "resumed"
