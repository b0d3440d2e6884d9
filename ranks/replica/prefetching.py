"""Prefetch: pages of one request from storage into host memory.

WAITING    -> its turn comes ->  QUERY: how far can every rank's store restore it?
QUERY      -> all answered   ->  TRANSFER, or, where the ranks differ in it,
RESTORABLE: each votes for the longest length it can restore that is not longer than the shortest
            that was voted for, until all vote for the same (rule R4), or for none
TRANSFER   -> all landed, or nothing more can, or time is up ->  settle (`settling`): what has
            landed on every rank goes to the tree; the rest waits in QUIESCE

Full attention alone can be restored up to any length up to the longest, so there one vote is enough.
"""

from collections import deque
from collections.abc import Sequence

from ...coordinator.operation import Kind, Outcome, Phase
from ...coordinator.seats import UNBOUNDED
from ...coordinator.verdict import Arrived, Found
from ...errors import InternalError
from ..orders import Cancel, Fetch, LookUp, ObjectTransfer
from .lookups import plan_lookup, room_for, wanted_positions
from .operations import Prefetch, Wanted
from .pages import PageRun
from .request import Request, Shortfall
from .settling import Settling
from .state import ReplicaState
from .tree import HOST

_QUERY, _TRANSFER, _COMPLETE = Phase.QUERY, Phase.TRANSFER, Outcome.COMPLETE
_LOOKING = (_QUERY, Phase.RESTORABLE)

VOTES_MAX = 16
"""Lengths that the ranks vote on for one prefetch, after which it is a miss."""


class Prefetching:
    """Begins prefetches and follows their verdicts."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._settling = Settling(state)
        self.waiting: deque[Prefetch] = deque()
        self.active: dict[int, Prefetch] = {}
        """From QUERY to TRANSFER: they have a seat in the ballot."""
        self.budget_used = 0
        """Host pages that prefetches beyond WAITING count for."""

    def begin(self, request: Request, tokens: bytes) -> bool:
        """Begin a prefetch of what would lengthen the part of `tokens` that can be restored."""
        state = self._state
        if not state.store_attached or request.prefetch is not None:
            return False
        if not state.keeps(request.place):
            return False
        if self.waiting and len(self.waiting) >= state.config.bounds.prefetches_waiting:
            return False
        plan = plan_lookup(state, state.root(request.place), tokens)
        if plan is None:
            return False
        operation = Prefetch(
            id=state.operations.new_id(),
            kind=Kind.PREFETCH,
            phase=Phase.WAITING,
            request=request.id,
            anchor=plan.anchor,
            floor=plan.floor,
            tokens=plan.tokens,
            needs=plan.needs,
            end=plan.anchor.end + len(plan.needs[0].keys),
            waits_since_ms=state.time_ms,
        )
        operation.receipts += plan.pin(state)
        state.operations.add(operation)
        request.prefetch = operation.id
        self.waiting.append(operation)
        state.journal.record(
            "prefetch", operation.id, request.id, plan.anchor.end, plan.floor, operation.end
        )
        self.begin_waiting()
        return True

    def begin_waiting(self) -> None:
        """Begin the prefetches whose turn has come, in the order of their ids."""
        state = self._state
        while self.waiting and len(self.active) < state.config.bounds.prefetches:
            operation = self.waiting[0]
            pages = max(1, len(operation.keys))
            if self.budget_used and self.budget_used + pages > state.config.prefetch_pages_max:
                return
            self.waiting.popleft()
            self.active[operation.id] = operation
            self._set_budget(operation, pages)
            state.advance(operation, _QUERY)
            operation.seat = state.seats.take(operation.id, operation.phase, operation.bound)
            state.ballot.seat(operation.id, operation.seat, operation.phase, operation.bound)
            timeout_s = state.config.timeouts.lookup_s
            state.orders.append(LookUp(operation.id, operation.floor, operation.needs, timeout_s))

    def expire_waiting(self) -> None:
        """End the prefetches whose turn has not come within the stop policy's cap.

        They wait behind others, each of which has a deadline; but a slow store lets the sum grow.
        """
        now_ms, cap_s = self._state.time_ms, self._state.config.stop_policy.cap_s
        while self.waiting:
            oldest = self.waiting[0]
            oldest.waits_since_ms = oldest.waits_since_ms or now_ms
            if now_ms - oldest.waits_since_ms <= cap_s * 1000:
                return
            self.waiting.popleft()
            self._finish(oldest, Outcome.EXPIRED)

    def found(self, verdict: Found) -> None:
        """Apply what the lookups of all ranks came to."""
        operation = self.active.get(verdict.operation)
        if operation is None or operation.phase not in _LOOKING:
            return
        if verdict.bound != operation.bound:
            return
        if verdict.pages is None:
            if verdict.expired_rank is not None:
                self._notify(operation, verdict.expired_rank, 0, "lookup timed out")
                self._end_query(operation, Outcome.MISS)
            return
        longest = verdict.longest or 0
        if operation.phase is _QUERY and verdict.pages < longest:
            self._notify_short(operation, verdict)
        if not verdict.pages:
            self._end_query(operation, Outcome.MISS)
        elif len(operation.needs) > 1 and verdict.pages != longest:
            self._vote_again(operation, verdict.pages)
        else:
            self._transfer(operation, min(verdict.pages, operation.end - operation.floor))

    def arrived(self, verdict: Arrived) -> None:
        """Apply how far the reads of all ranks have come.

        Complete means every object of every pool, on every rank (incident C).
        """
        operation = self.active.get(verdict.operation)
        if operation is None or operation.phase is not _TRANSFER:
            return
        total = operation.wanted_count
        if verdict.pages > operation.landed:
            operation.landed = min(verdict.pages, total)
        if operation.landed == total:
            self.settle(operation)
        elif verdict.ceiling is not None and operation.landed >= verdict.ceiling:
            self._remember_miss(operation, verdict.ceiling)
            self._notify(operation, verdict.ceiling_rank, verdict.ceiling, "could not be read")
            self.settle(operation)
        elif verdict.expired_rank is not None:
            self._notify(operation, verdict.expired_rank, operation.landed, "timed out")
            self.settle(operation)

    def stop(self, request: Request) -> None:
        """End the request's prefetch, if it has one, with what verdicts have said so far."""
        if request.prefetch is None:
            return
        operation = self._state.operations.in_flight[request.prefetch]
        assert isinstance(operation, Prefetch)
        if operation.phase is Phase.WAITING:
            self.waiting.remove(operation)
            self._finish(operation, Outcome.ABORTED)
        else:
            self._cut_short(operation)

    def settle(self, operation: Prefetch) -> None:
        """Give the tree what has landed on every rank; what has not waits until I/O is quiet."""
        state = self._state
        wanted, landed = operation.wanted_count, operation.landed
        reached = self._settling.settle(operation)
        request = state.requests.get(operation.request)
        if request is not None and request.prefetch == operation.id and reached > operation.floor:
            first, last = request.fetched
            start = first if last == operation.floor else operation.floor
            request.fetched = (start, reached)
        if landed == wanted:
            outcome = _COMPLETE if reached == operation.end else Outcome.PARTIAL
            self._finish(operation, outcome)
            return
        state.journal.record("settle", operation.id, landed, reached)
        self._step_down(operation)
        state.ballot.unseat(operation.id)
        state.release_receipts(operation)
        state.stop(operation, Outcome.PARTIAL if landed else Outcome.MISS)

    def quiet(self, operation: Prefetch) -> None:
        """Finish a prefetch whose I/O no longer touches its pages on any rank."""
        self._set_budget(operation, 0)
        assert operation.ending is not None
        self._state.finish(operation, operation.ending)
        self.begin_waiting()

    def quarantined(self, operation: Prefetch) -> None:
        """Stop counting the pages against prefetching: quarantine has a bound of its own."""
        self._set_budget(operation, 0)

    def abandon(self) -> None:
        """End all prefetches, with what has landed of them: the store is detached."""
        waiting, self.waiting = self.waiting, deque()
        for operation in waiting:
            self._finish(operation, Outcome.ABORTED)
        for operation in list(self.active.values()):
            self._cut_short(operation)

    def _cut_short(self, operation: Prefetch) -> None:
        if operation.phase is _TRANSFER:
            self.settle(operation)
        else:
            self._end_query(operation, Outcome.ABORTED)

    def _vote_again(self, operation: Prefetch, bound: int) -> None:
        """Look for a shorter length: none that is longer than `bound` is common to all ranks."""
        operation.votes += 1
        if operation.votes >= VOTES_MAX:
            self._end_query(operation, Outcome.MISS)
            return
        operation.bound = bound
        if operation.phase is _QUERY:
            self._state.advance(operation, Phase.RESTORABLE)
        self._change_seat(operation)
        self._state.journal.record("bound", operation.id, bound)

    def _transfer(self, operation: Prefetch, length: int) -> None:
        """Reserve host pages for the agreed length, or for less of it, and read."""
        state = self._state
        fits = room_for(state, operation, length)
        if not fits:
            self._end_query(operation, Outcome.NO_ROOM)
            return
        if fits < length and len(operation.needs) > 1:
            # What there is room for need not be a length that can be restored.
            self._vote_again(operation, fits)
            return
        positions = wanted_positions(state, operation, fits)
        taken = state.residence.take(HOST, [len(each) for each in positions])
        if taken is None:
            self._end_query(operation, Outcome.NO_ROOM)
            return
        operation.goal = operation.floor + fits
        transfers = self._assign(operation, positions, taken)
        if not transfers:
            raise InternalError(f"prefetch {operation.id} would read nothing, and never end")
        operation.bound = UNBOUNDED
        self._set_budget(operation, len(positions[0]) or 1)
        state.operations.advance(operation, _TRANSFER)
        state.journal.record("transfer", operation.id, operation.goal)
        self._change_seat(operation)
        timeout_s = state.config.stop_policy.timeout_s(fits * state.config.page_tokens)
        state.orders.append(Fetch(operation.id, transfers, timeout_s))

    def _assign(
        self, operation: Prefetch, positions: Sequence[Sequence[int]], taken: Sequence[PageRun]
    ) -> tuple[ObjectTransfer, ...]:
        """Let an operation read what lies at the positions, by component, into what was taken."""
        wanted: list[Wanted] = []
        transfers: list[ObjectTransfer] = []
        for component, pages in enumerate(taken):
            if pages:
                need, at = operation.needs[component], positions[component]
                keys = need.keys_at(at)
                wanted.append(Wanted(component, at, keys, pages))
                transfers.append(ObjectTransfer(need.pool, keys, tuple(pages)))
        operation.assign(wanted)
        return tuple(transfers)

    def _remember_miss(self, operation: Prefetch, index: int) -> None:
        state = self._state
        component, key = operation.wanted_keys()[index]
        name = (state.components[component].pool, key)
        state.misses.pop(name, None)
        state.misses[name] = state.time_ms + int(state.config.timeouts.miss_memory_s * 1000)
        while len(state.misses) > state.config.bounds.remembered_misses:
            state.misses.popitem(last=False)
        state.journal.record("miss", name[0], key.hex()[:16])

    def _end_query(self, operation: Prefetch, outcome: Outcome) -> None:
        # A lookup touches no pages, so nothing has to become quiet.
        self._state.orders.append(Cancel(operation.id, self._state.config.timeouts.quiesce_s))
        self._finish(operation, outcome)

    def _finish(self, operation: Prefetch, outcome: Outcome) -> None:
        self._step_down(operation)
        self._set_budget(operation, 0)
        self._state.finish(operation, outcome)
        self.begin_waiting()

    def _change_seat(self, operation: Prefetch) -> None:
        """Let the lanes of the operation's seat mean what its phase and bound say now."""
        state, seat = self._state, operation.seat
        assert seat is not None
        state.seats.change(seat, operation.phase, operation.bound)
        state.ballot.seat(operation.id, seat, operation.phase, operation.bound)

    def _step_down(self, operation: Prefetch) -> None:
        """Let an operation be active no longer.

        The caller lets the ballot unseat or forget it, before another takes its seat.
        """
        self.active.pop(operation.id, None)
        if operation.seat is not None:
            self._state.seats.give_back(operation.seat)
            operation.seat = None
        request = self._state.requests.get(operation.request)
        if request is not None and request.prefetch == operation.id:
            request.prefetch = None

    def _set_budget(self, operation: Prefetch, pages: int) -> None:
        self.budget_used += pages - operation.budget
        operation.budget = pages

    def _notify_short(self, operation: Prefetch, verdict: Found) -> None:
        assert verdict.pages is not None
        assert operation.anchor is not None
        page = operation.floor + verdict.pages - operation.anchor.end
        if 0 <= page < len(operation.keys):
            self._notify(operation, verdict.shortest_rank, page, "other ranks' stores have it")

    def _notify(self, operation: Prefetch, rank: int | None, page: int, reason: str) -> None:
        known = [key for _, key in operation.wanted_keys()] or operation.keys
        self._state.notices.append(
            Shortfall(
                operation=operation.id,
                request=operation.request,
                rank=rank,
                page=page,
                key=known[page] if page < len(known) else b"",
                reason=reason,
            )
        )
