"""Backups from engine-owned device pages; the engine does not change a page while a backup reads it."""

from ..checkers.checkers import check_covered
from ..world.request import EngineRequest
from .lending_engine import LendingEngine


class LendingBackups(LendingEngine):
    """Backs up requests' computed tokens from engine-owned device pages."""

    def back_up(self, request: EngineRequest, generation: int) -> bool:
        """Back up a request's whole pages, or sometimes fewer, after this step's forward pass.

        Return False if there is nothing to back up. If the cache was not reset since the request
        started, raise unless the backup covers all tokens that a match finds on the host.
        `generation` is the current number of resets.
        """
        known = max(request.computed, request.planned)
        if request.unknown or (known < self.page_tokens and self.random.random() < 0.9):
            return False
        if self.random.random() < 0.15:
            known = self.random.randint(0, known)
        tokens, slot = request.head(known), self._state_to_lend(request, known)
        whole = known // self.page_tokens
        last = len(request.table) if self.random.random() < 0.2 else whole
        covered = self.ask(
            request,
            "back_up",
            lambda c: c.back_up(
                request.name,
                tokens,
                self.pools.lend(c.rank, request, 0, last, slot),
                request.namespace,
            ),
        )
        self.coverage["backups"] += 1
        request.admitted = True
        match = self.ask(request, "match", lambda c: c.match(tokens, request.namespace))
        found = match.host_tokens if request.generation == generation else 0
        check_covered(request.name, covered, found, known, self.page_tokens)
        return True

    def let_go(self, request: EngineRequest) -> None:
        """Free the pages and state copies that were kept only for a backup, if it has ended."""
        if self.ask(request, "lends", lambda c: c.has_copies_in_flight(request.name)):
            return
        request.lends_state = False
        self.pools.let_go_of_copies(request)
        self.coverage["pages left behind by a window"] += self.pools.leave_behind(request)

    def _state_to_lend(self, request: EngineRequest, known: int) -> list[int]:
        """Return a list with the state slot that a backup of `known` tokens reads; empty for no state.

        The slot has either a copy of the state, or the state that the model updates. In the latter
        case, the request waits until the backup has ended.
        """
        if known % self.page_tokens:
            # A backup ignores the state if the tokens end within a page. Pass a slot nevertheless, to
            # test this.
            return self.pools.slot(request)
        if not known or known != max(request.computed, request.planned):
            return []
        draw = self.random.random()
        if request.copies_state or (draw < 0.5 and self.pools.reserve_copy(request)):
            self.coverage["states lent as copies"] += 1
            return request.kept[-1:]
        if draw > 0.85 or not (slot := self.pools.slot(request)):
            return []
        self.coverage["states lent where they are computed"] += 1
        request.lends_state = True
        return slot
