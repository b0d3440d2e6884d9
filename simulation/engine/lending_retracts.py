"""Retraction of requests from engine-owned device pages, and their resumption into new pages."""

from ...coordinator.operation import Phase
from ...ranks.protocol.answers import Wait
from ...ranks.replica.operations.requests import LoadState
from ..world.request import EngineRequest, EngineStage
from .lending_engine import LendingEngine


class LendingRetracts(LendingEngine):
    """Retracts requests to host memory, and resumes them."""

    def retract(self, request: EngineRequest) -> bool:
        """Retract a request after this step's forward pass; return False if the cache refuses."""
        if request.unknown or request.name not in self.caches[0].inspection.requests:
            return False
        known = max(request.computed, request.planned)
        last, slot = -(-known // self.page_tokens), self.pools.slot(request) if known else []
        done = self.ask(
            request,
            "retract",
            lambda c: c.retract(
                request.name, request.head(known), self.pools.lend(c.rank, request, 0, last, slot)
            ),
        )
        request.admitted = True
        self.coverage[self._named("retracts", known) if done else "retracts refused"] += 1
        if done:
            request.stage, request.refused = EngineStage.RETRACTED, 0
        return done

    def look(self, request: EngineRequest) -> str:
        """Return how a retraction ended, or "waits"; resume the request once its pages are saved."""
        state = self.ask(request, "load_state", lambda c: c.load_state(request.name))
        if state in (LoadState.FAILED, LoadState.SAVED) and self._hangs(request):
            self.coverage[f"{state} beside a copy that hangs"] += 1
            self.ask(request, "wait_for_copies", lambda c: c.wait_for_copies(request.name))
        if state is LoadState.FAILED:
            self.coverage["retracts failed"] += 1
            return "failed"
        if state is not LoadState.SAVED:
            request.refused += 1
        elif request.tables:
            self.pools.require_untouched(f"request {request.name} is SAVED", request)
            request.bringing, request.computed, request.refused = request.computed, 0, 0
            held = self.pools.take_all(request)
            # The retraction has saved the pages, so other requests may use them from now on.
            self.pools.give_back(held, overwrite=self.random.random() < 0.7)
        elif self.random.random() < 0.6:
            return self._resume(request)
        return "waits"

    def _hangs(self, request: EngineRequest) -> bool:
        """Return whether a request waits only for quarantined copies, which may never end."""
        seen = self.caches[0].inspection
        phases = {seen.in_flight[n].phase for n in seen.touching(request.name)}
        return phases == {Phase.QUARANTINED}

    def _resume(self, request: EngineRequest) -> str:
        length, first = request.bringing, 0
        if self.random.random() < 0.7:
            first = self.pools.cached(request, length // self.page_tokens, with_state=False)
        if not self.pools.begin(request, first, length):
            request.refused += 1
            return "waits"
        last, slot = -(-length // self.page_tokens), self.pools.slot(request) if length else []
        start = request.computed = first * self.page_tokens
        answer = self.ask(
            request,
            "resume",
            lambda c: c.resume(
                request.name,
                self.pools.lend(c.rank, request, first, last, slot),
                device_tokens=start,
            ),
        )
        if answer is Wait.LOST:
            self.coverage["resumes lost"] += 1
            self.pools.give_back(self.pools.take_all(request))
            return "lost"
        self.coverage[self._named("resumes", length)] += 1
        self.coverage["resumes beside pages on the device"] += first > 0
        request.stage, request.resumes, request.state_comes = EngineStage.LOADING, True, True
        return "resumed"

    def _named(self, what: str, length: int) -> str:
        return f"{what} {'with a begun page' if length % self.page_tokens else 'of whole pages'}"
