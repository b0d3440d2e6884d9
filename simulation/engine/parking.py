"""How an engine hands requests over: to storage and back, and to readers of other groups.

A request that is retracted is offered to the store, leaves, and is taken up again out of storage as
another group would take it up: with its tail, so that it goes on where it was.
"""

from collections.abc import Callable, Sequence

from ...ranks.cache import Cache
from ...ranks.rank_cache import RankCache
from ...ranks.replica.answers import Admission, Wait
from ...ranks.replica.extent import Extent
from ...ranks.replica.requests import LoadState
from ..checkers.findings.answers import ImpossibleAnswer
from ..checkers.findings.finding import Violated
from ..cluster import ask
from ..faults import FAULT_PROFILES
from ..world import World
from .request import EngineRequest, EngineStage


class Parking:
    """Parks requests in storage and takes them up again, and serves some of what they compute."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.random = world.stream("parking")
        self._ends = world.stream("ends")
        self._share = FAULT_PROFILES[world.fault_profile].parked
        self._page = world.page_tokens

    def strikes(self) -> bool:
        """Draw whether a retracted request is to be parked in storage."""
        return self.random.random() < self._share

    def serve(self, caches: Sequence[RankCache], request: EngineRequest, length: int) -> bool:
        """Offer `length` tokens of a request, one way or the other, or withdraw it, now and then."""
        draw = self.random.random()
        if draw > 0.03:
            return False
        tokens = request.head(length)
        if draw < 0.01:
            ask("withdraw", caches, lambda c: c.withdraw(request.name))
        elif draw < 0.02:
            self._check(length, ask("offer", caches, lambda c: c.offer(request.name, tokens)))
        else:
            ttl_s = self.random.choice((0.05, 0.5, 30.0))
            self._serve(caches, request, length, ttl_s)
            # As vLLM's producer: up to what it has promised, and then up to what has become of that.
            for _ in range(self._ends.choice((0, 1, 2, 3))):
                self._serve(caches, request, self._ends.randint(0, length), ttl_s, ends=True)
        return True

    def _serve(
        self,
        caches: Sequence[RankCache],
        request: EngineRequest,
        length: int,
        ttl_s: float,
        *,
        ends: bool = False,
    ) -> None:
        tokens = request.head(length)
        told = ask("serve", caches, lambda c: c.serve(request.name, tokens, ttl_s=ttl_s, ends=ends))
        self._check(length, told)

    def park(self, caches: Sequence[Cache], request: EngineRequest) -> str:
        """Offer a retracted request to the store, and let it leave once that has all of it.

        Returns what became of it.
        """
        tokens = request.head(request.computed)
        if ask("load_state", caches, lambda c: c.load_state(request.name)) is not LoadState.SAVED:
            return "waits"
        stored = ask("offer", caches, lambda c: c.offer(request.name, tokens))
        self._check(request.computed, stored)
        if stored < request.computed:
            request.refused += 1
            return "refused"
        ask("release", caches, lambda c: c.release(request.name))
        request.stage, request.refused = EngineStage.PARKED, 0
        self._prefetch(caches, request, Extent.ALL)
        return "parked"

    def take_up(
        self,
        caches: Sequence[Cache],
        request: EngineRequest,
        resumed: Callable[[EngineRequest, Admission], None],
    ) -> str:
        """Take a parked request up again, if what storage has of it has come."""
        done = ask("prefetch_done", caches, lambda c: c.prefetch_done(request.name))
        if not done:
            return "waits"
        if self.random.random() < 0.2:
            # An engine may ask again, for all of it or for as much of it as there is.
            request.refused += 1
            self._prefetch(caches, request, self.random.choice((Extent.ALL, Extent.PAGES)))
            return "asked again"
        tokens, reserve = request.head(request.computed), request.computed
        there = ask(
            "received", caches, lambda c: c.received(request.name, tokens, request.namespace)
        )
        if there < reserve and not self._world.may_fit(there, reserve):
            # What was left behind by a window would have to be computed again.
            ask("release", caches, lambda c: c.release(request.name))
            return "lost"
        answer = ask(
            "load_back",
            caches,
            lambda c: c.load_back(request.name, tokens, request.namespace, reserve_tokens=reserve),
        )
        if isinstance(answer, Wait):
            request.refused += 1
            return "refused"
        if answer.cached_tokens < request.computed:
            ask("release", caches, lambda c: c.release(request.name))
            return "lost"
        if answer.cached_tokens > request.computed:
            raise Violated(ImpossibleAnswer("an admission", f"of {reserve} tokens says {answer}"))
        request.room = -(-reserve // self._page) * self._page
        request.refused, request.checkpoints = 0, answer.checkpoints
        resumed(request, answer)
        return "taken up"

    def _prefetch(self, caches: Sequence[Cache], request: EngineRequest, extent: Extent) -> None:
        tokens = request.head(request.computed)
        ask(
            "prefetch",
            caches,
            lambda c: c.prefetch(request.name, tokens, request.namespace, extent=extent),
        )

    def _check(self, length: int, told: int) -> None:
        whole = told == length or not told % self._page
        if not (whole and 0 <= told <= length):
            said = f"of {length} tokens says {told}"
            raise Violated(ImpossibleAnswer("an offer", said))
