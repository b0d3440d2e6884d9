"""Prefetch: pages of one request from storage into host memory.

WAITING  -> its turn comes ->  QUERY: which of its pages does every rank's store have?
QUERY    -> all answered   ->  TRANSFER: as many host pages as there is room for are reserved
TRANSFER -> all landed, or nothing more can, or time is up ->  settle: what has landed on every
            rank is inserted under the anchor; the rest waits in QUIESCE
"""

from collections import deque

from ...coordinator.lanes import Slot
from ...coordinator.operation import Kind, Outcome, Phase
from ...coordinator.verdict import Arrived, Found
from ..orders import KV_POOL, Cancel, Fetch, LookUp, ObjectTransfer
from .operations import Prefetch
from .pages import PageRun
from .request import Request, Shortfall
from .state import ReplicaState
from .tree import HOST, Node


class Prefetching:
    """Begins prefetches, follows their verdicts and settles them."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.waiting: deque[Prefetch] = deque()
        self.active: dict[int, Prefetch] = {}
        """In QUERY or TRANSFER: they have a place in the ballot."""
        self.budget_used = 0
        """Host pages that prefetches beyond WAITING count for."""

    def slots(self) -> tuple[Slot, ...]:
        """Return the places of the active prefetches in the next ballot."""
        return tuple(Slot(each.id, each.phase) for each in self.active.values())

    def begin(self, request: Request, tokens: bytes) -> bool:
        """Begin a prefetch of what follows the part of `tokens` that is on device or host."""
        state = self._state
        if not state.store_attached or request.prefetch is not None:
            return False
        if self.waiting and len(self.waiting) >= state.config.bounds.prefetches_waiting:
            return False
        root = state.root(request.place)
        anchor = self._anchor(root, tokens)
        if anchor is None:
            return False
        wanted = tokens[anchor.end * state.tree.page_bytes :]
        pages = min(state.tree.whole_pages(wanted), state.config.prefetch_pages_max)
        # Hashing is a good part of the cost of a prefetch that finds nothing, so the bound comes first.
        wanted = wanted[: pages * state.tree.page_bytes]
        keys = self._offered(self._keys_after(anchor, wanted))
        if not keys:
            return False
        operation = Prefetch(
            id=state.operations.new_id(),
            kind=Kind.PREFETCH,
            phase=Phase.WAITING,
            request=request.id,
            anchor=anchor,
            tokens=wanted[: len(keys) * state.tree.page_bytes],
            keys=tuple(keys),
            waits_since_ms=state.time_ms,
        )
        operation.receipts.append(state.holds.acquire(HOST, state.component.index, anchor))
        state.operations.add(operation)
        request.prefetch = operation.id
        self.waiting.append(operation)
        state.journal.record("prefetch", operation.id, request.id, anchor.end, len(keys))
        self.begin_waiting()
        return True

    def begin_waiting(self) -> None:
        """Begin the prefetches whose turn has come, in the order of their ids."""
        state = self._state
        while self.waiting and len(self.active) < state.config.bounds.prefetches:
            operation = self.waiting[0]
            pages = len(operation.keys)
            if self.budget_used and self.budget_used + pages > state.config.prefetch_pages_max:
                return
            self.waiting.popleft()
            self.active[operation.id] = operation
            self._set_budget(operation, pages)
            state.advance(operation, Phase.QUERY)
            state.ballot.expect(operation.id)
            timeout_s = state.config.timeouts.lookup_s
            state.orders.append(LookUp(operation.id, KV_POOL, operation.keys, timeout_s))

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
        state = self._state
        operation = self.active.get(verdict.operation)
        if operation is None or operation.phase is not Phase.QUERY:
            return
        if verdict.pages is None:
            if verdict.expired_rank is not None:
                self._notify(operation, verdict.expired_rank, 0, "lookup timed out")
                self._end_query(operation, Outcome.MISS)
            return
        if not state.store_attached:
            self._end_query(operation, Outcome.ABORTED)
            return
        found = min(verdict.pages, len(operation.keys))
        if found < len(operation.keys) and found < (verdict.longest or 0):
            self._notify(operation, verdict.shortest_rank, found, "other ranks' stores have it")
        if not found:
            self._end_query(operation, Outcome.MISS)
            return
        pages = state.take(HOST, min(found, state.available(HOST)))
        if not pages:
            self._end_query(operation, Outcome.NO_ROOM)
            return
        operation.owned[HOST].extend(pages)
        self._set_budget(operation, len(pages))
        state.advance(operation, Phase.TRANSFER)
        transfer = ObjectTransfer(KV_POOL, operation.keys[: len(pages)], tuple(pages))
        timeout_s = state.config.stop_policy.timeout_s(len(pages) * state.config.page_tokens)
        state.orders.append(Fetch(operation.id, (transfer,), timeout_s))

    def arrived(self, verdict: Arrived) -> None:
        """Apply how far the reads of all ranks have come."""
        operation = self.active.get(verdict.operation)
        if operation is None or operation.phase is not Phase.TRANSFER:
            return
        total = len(operation.owned[HOST])
        operation.landed = max(operation.landed, min(verdict.pages, total))
        if operation.landed == total:
            self.settle(operation)
        elif verdict.ceiling is not None and operation.landed >= verdict.ceiling:
            self._remember_miss(operation.keys[verdict.ceiling])
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
        elif operation.phase is Phase.QUERY:
            self._end_query(operation, Outcome.ABORTED)
        else:
            self.settle(operation)

    def settle(self, operation: Prefetch) -> None:
        """Insert what has landed on every rank; what has not waits until I/O is quiet."""
        state = self._state
        pages = operation.owned[HOST]
        landed = operation.landed
        assert operation.anchor is not None
        self._insert_landed(operation, operation.anchor, pages[:landed])
        request = state.requests.get(operation.request)
        if request is not None and request.prefetch == operation.id:
            start = operation.anchor.end
            if landed:
                first, last = request.fetched
                request.fetched = (first if last == start else start, start + landed)
        del pages[:landed]
        state.journal.record("settle", operation.id, landed)
        if not pages:
            complete = landed == len(operation.keys)
            self._finish(operation, Outcome.COMPLETE if complete else Outcome.PARTIAL)
            return
        self._leave_ballot(operation)
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

    def abandon_waiting(self) -> None:
        """End the prefetches that have not begun: the store is detached."""
        waiting, self.waiting = self.waiting, deque()
        for operation in waiting:
            self._finish(operation, Outcome.ABORTED)

    def _anchor(self, root: Node, tokens: bytes) -> Node | None:
        """Return the deepest node that a prefetch can continue, or None if there is no such node.

        It must be on the host, since what is inserted below it will be: a backed-up child implies a
        backed-up parent.
        """
        nodes = self._state.walk_to(root, tokens)
        if not nodes:
            return root
        return nodes[-1] if nodes[-1].values[HOST][0] is not None else None

    def _keys_after(self, anchor: Node, tokens: bytes) -> list[bytes]:
        seed = self._state.tree.keys(anchor)[-1]
        return self._state.page_keys(seed, tokens)

    def _offered(self, keys: list[bytes]) -> list[bytes]:
        """Return the leading keys that are not remembered as unreadable."""
        misses = self._state.misses
        if misses:
            for index, key in enumerate(keys):
                if misses.get(key, 0) > self._state.time_ms:
                    return keys[:index]
        return keys

    def _remember_miss(self, key: bytes) -> None:
        state = self._state
        state.misses.pop(key, None)
        state.misses[key] = state.time_ms + int(state.config.timeouts.miss_memory_s * 1000)
        while len(state.misses) > state.config.bounds.remembered_misses:
            state.misses.popitem(last=False)
        state.journal.record("miss", key.hex()[:16])

    def _insert_landed(self, operation: Prefetch, anchor: Node, pages: PageRun) -> None:
        state = self._state
        state.tick()
        step = state.tree.page_bytes
        tokens = operation.tokens[: len(pages) * step]
        node = anchor
        at = 0
        for existing in state.walk_to(anchor, tokens):
            mine = pages[at : at + existing.width]
            if existing.values[HOST][0] is None:
                state.attach(existing, HOST, mine)
                existing.persisted = True
            else:
                state.pools[HOST].give_back(mine)
            at += existing.width
            node = existing
        if at < len(pages):
            node = state.tree.add(node, tokens[at * step :])
            node.keys = list(operation.keys[at : len(pages)])
            node.persisted = True
            state.attach(node, HOST, pages[at:])
        state.touch(node)

    def _end_query(self, operation: Prefetch, outcome: Outcome) -> None:
        # A lookup touches no pages, so nothing has to become quiet.
        self._state.orders.append(Cancel(operation.id, self._state.config.timeouts.quiesce_s))
        self._finish(operation, outcome)

    def _finish(self, operation: Prefetch, outcome: Outcome) -> None:
        self._leave_ballot(operation)
        self._set_budget(operation, 0)
        self._state.finish(operation, outcome)
        self.begin_waiting()

    def _leave_ballot(self, operation: Prefetch) -> None:
        self.active.pop(operation.id, None)
        request = self._state.requests.get(operation.request)
        if request is not None and request.prefetch == operation.id:
            request.prefetch = None

    def _set_budget(self, operation: Prefetch, pages: int) -> None:
        self.budget_used += pages - operation.budget
        operation.budget = pages

    def _notify(self, operation: Prefetch, rank: int | None, page: int, reason: str) -> None:
        self._state.notices.append(
            Shortfall(
                operation=operation.id,
                request=operation.request,
                rank=rank,
                page=page,
                key=operation.keys[page],
                reason=reason,
            )
        )
