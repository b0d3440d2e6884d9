"""Loads from host memory into the device pages of a simulated engine that owns them."""

from ...ranks.replica.operations.requests import LoadState
from ..world.request import EngineRequest, EngineStage
from ..world.violated import Violated
from .lending_engine import LendingEngine


class LendingLoads(LendingEngine):
    """Loads cached prefixes of requests; the engine checks its own prefix cache on the device first."""

    def hit(self, request: EngineRequest, device_tokens: int, length: int | None = None) -> int:
        """Return how many host tokens the cache can load; raise if a match finds another number."""
        most = request.prompt - 1 if length is None else length
        tokens = request.head(most)
        hit = self.ask(
            request,
            "hit",
            lambda c: c.match_host(
                request.name, tokens, request.namespace, device_tokens=device_tokens
            ),
        )
        found = self.ask(request, "match", lambda c: c.match(tokens, request.namespace))
        expected = 0 if request.failed else max(0, found.host_tokens - device_tokens)
        if hit != expected or hit % self.page_tokens or (hit and device_tokens + hit > most):
            when = f"where it {'failed' if request.failed else 'never failed'} to load before"
            raise Violated(
                f"request {request.name} has {device_tokens} tokens on the device, match finds"
                f" {found.host_tokens} on the host, and hit says {hit}, {when}"
            )
        return hit

    def admit(self, request: EngineRequest) -> None:
        """Report to the cache that a request now computes all tokens that are not on the device."""
        tokens = request.head(request.prompt - 1)
        self.ask(
            request,
            "admit",
            lambda c: c.admit(
                request.name, tokens, request.namespace, device_tokens=request.computed
            ),
        )

    def choose(self, request: EngineRequest) -> tuple[int, int]:
        """Return (first, last): the range of page positions that a load must bring (`last` exclusive).

        All pages before `first` are in the prefix cache on the device. If both positions are equal, the
        request loads nothing.
        """
        unit, most, hit = self.page_tokens, request.prompt - 1, 0
        shared = most // unit if self.random.random() < 0.7 else 0
        if self.random.random() < 0.15:
            most = self.random.randint(0, most)
        may_load = self.random.random() < 0.95
        # First ignore whether the state is on the device, because a load would bring it. If nothing can
        # be loaded, use only device pages that the prefix cache has together with the state.
        first = self.pools.cached(request, shared, with_state=False)
        if may_load:
            hit = self.hit(request, first * unit, most)
        if not hit:
            first = self.pools.cached(request, first, with_state=True)
            hit = self.hit(request, first * unit, most) if may_load else 0
        return first, first + hit // unit

    def load(self, request: EngineRequest, first: int, last: int) -> None:
        """Make every rank load a request's pages at positions `first` to `last` (exclusive)."""
        pools, end = self.pools, last * self.page_tokens
        request.bringing, request.state_comes = end, True
        self.ask(
            request,
            "load",
            lambda c: c.load(
                request.name,
                request.head(end),
                pools.lend(c.rank, request, first, last, pools.slot(request)),
                device_tokens=request.computed,
            ),
        )
        self.coverage["loads"] += 1
        self.coverage["loads that leave lent pages unfilled"] += any(request.unfilled.values())
        for begin in pools.windows(end):
            self.coverage["loads of a window that begins on the device"] += begin < first
            self.coverage["loads of a window that begins behind the device"] += 0 < first < begin
        request.admitted, request.stage = True, EngineStage.LOADING

    def look(self, request: EngineRequest) -> LoadState:
        """Return the state of a load: running, succeeded or failed; record a load that has ended.

        Once the cache reports the end of a load, no copy may access the request's pages.
        """
        state = self.ask(request, "load_state", lambda c: c.load_state(request.name))
        if state is LoadState.LOADING:
            return state
        why = f"the load of request {request.name} is {state.name}"
        self.pools.require_untouched(why, request)
        request.state_comes = False
        if state is LoadState.READY:
            self.coverage["tokens from host"] += request.bringing - request.computed
            request.computed = request.bringing
            request.failed &= not request.resumes
        else:
            self.coverage["resumes failed" if request.resumes else "loads failed"] += 1
            request.failed = True
            self.hit(request, 0)
        return state
