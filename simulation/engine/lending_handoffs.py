"""An engine that owns its device pages lets requests leave by storage, and takes them up from there.

As another group would take them up: with their tails, so that they go on where they were.
"""

from ...ranks.replica.extent import Extent
from ...ranks.replica.requests import LoadState
from .lending import Lending
from .request import EngineRequest, EngineStage


class LendingHandoffs(Lending):
    """Parks requests that are saved, and takes them up again."""

    def park(self, request: EngineRequest, generation: int) -> str:
        """Offer a retracted request to the store, and let it leave once that has all of it.

        Returns what became of it.
        """
        length = request.bringing
        state = self.ask(request, "load_state", lambda c: c.load_state(request.name))
        lends = self.ask(request, "lends", lambda c: c.lends(request.name))
        if state is not LoadState.SAVED or request.tables or lends or not length:
            return "waits"
        tokens = request.head(length)
        if self.ask(request, "offer", lambda c: c.offer(request.name, tokens)) < length:
            request.refused += 1
            return "refused"
        self.ask(request, "release", lambda c: c.release(request.name))
        request.stage, request.refused, request.admitted = EngineStage.PARKED, 0, False
        request.failed, request.generation = False, generation
        self._prefetch(request, Extent.ALL)
        return "parked"

    def take_up(self, request: EngineRequest, generation: int) -> str:
        """Load what was left of a parked request, if all of it has come; return what became of it."""
        if not self.ask(request, "prefetch_done", lambda c: c.prefetch_done(request.name)):
            return "waits"
        if self.random.random() < 0.2:
            # An engine may ask again, for all of it or for as much of it as there is.
            request.refused += 1
            self._prefetch(request, self.random.choice((Extent.ALL, Extent.PAGES)))
            return "asked again"
        length, unit, first = request.bringing, self.page_tokens, 0
        if self.random.random() < 0.5:
            first = self.pools.cached(request, (length - 1) // unit, with_state=False)
        tokens, start = request.head(length), first * unit
        hit = self.ask(
            request,
            "hit",
            lambda c: c.hit(request.name, tokens, request.namespace, device_tokens=start),
        )
        if start + hit < length:
            self.ask(request, "release", lambda c: c.release(request.name))
            return "lost"
        if not self.pools.begin(request, first, length):
            request.refused += 1
            return "refused"
        slot, last = self.pools.slot(request), -(-length // unit)
        self.ask(
            request,
            "load",
            lambda c: c.load(
                request.name,
                tokens,
                self.pools.lend(c.rank, request, first, last, slot),
                device_tokens=start,
            ),
        )
        request.computed, request.generation, request.refused = start, generation, 0
        request.stage, request.resumes = EngineStage.LOADING, True
        request.state_comes = request.admitted = True
        self.coverage["taken up beside pages on the device"] += first > 0
        return "taken up"

    def _prefetch(self, request: EngineRequest, extent: Extent) -> None:
        tokens = request.head(request.bringing)
        self.ask(
            request,
            "prefetch",
            lambda c: c.prefetch(request.name, tokens, request.namespace, extent=extent),
        )
