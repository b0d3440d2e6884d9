"""Prefetch: read pages of one request from storage into host memory.

    WAITING     until a prefetch slot and budget are free, then QUERY
    QUERY       each rank looks up how far its store can restore the prefix. When all have answered:
                TRANSFER, or RESTORABLE if the ranks differ
    RESTORABLE  each rank votes for its longest restorable length not above the shortest length voted
                for so far, until all vote for the same length (rule R4) or for none
    TRANSFER    ends when all objects have landed, no more can land, or the deadline passes. Pages
                landed on every rank are inserted into the tree; the rest waits in QUIESCE

With full attention alone, one vote is enough, because it can be restored up to any length. Its pages
are inserted under the anchor up to the first gap, and a later prefetch continues from there. Windows
and states are inserted only if all objects have landed; their validators decide whether a match may end
there.
"""

from collections import deque
from collections.abc import Sequence

from ....coordinator.operation import Outcome, Phase
from ....coordinator.prefetch_slots import UNBOUNDED
from ....coordinator.verdict import PrefetchArrived, PrefetchFound
from ....errors import InternalError
from ...protocol.events import OTHERS_HAVE_IT, Cause, Missed, MissingOnRank, MissReason
from ...protocol.orders import Fetch, LookUp, ObjectTransfer
from ..core.pages import PageRun, page_run
from ..core.replica_parts import ReplicaParts
from ..operations.kinds import Prefetch, WantedPages
from ..operations.operation_table import OperationTable
from ..operations.requests import Request, Requests
from ..operations.store import Store
from ..tree.components import Component
from ..tree.node import HOST, Node
from ..tree.prefixes import Prefixes
from .lookups import LookupPlanner

_QUERY, _TRANSFER, _COMPLETE = Phase.QUERY, Phase.TRANSFER, Outcome.COMPLETE
_LOOKING = (_QUERY, Phase.RESTORABLE)

VOTES_MAX = 16
"""A prefetch counts as a miss after this many votes in which the ranks did not agree on its length."""


class Prefetching:
    """Starts prefetches and applies their verdicts."""

    def __init__(
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        store: Store,
        requests: Requests,
    ) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._prefixes = prefixes
        self._operation_table = operation_table
        self._store = store
        self._requests = requests
        self._outbox = basis.outbox
        self._seen = basis.misses
        self._lookups = LookupPlanner(basis, prefixes, store)
        self.waiting: deque[Prefetch] = deque()
        self.budget_used = 0
        """Number of host pages that all prefetches together take from the prefetch budget."""

    @property
    def active(self) -> list[Prefetch]:
        """The prefetches with a prefetch slot in the ballot (QUERY to TRANSFER), by ascending id."""
        in_flight = self._operation_table.in_flight.values()
        return [
            each
            for each in in_flight
            if isinstance(each, Prefetch) and each.prefetch_slot is not None
        ]

    def has_slot(self, number: int) -> Prefetch | None:
        """Return a prefetch that has a prefetch slot, by its id, or None."""
        operation = self._operation_table.in_flight.get(number)
        if isinstance(operation, Prefetch) and operation.prefetch_slot is not None:
            return operation
        return None

    def begin(self, request: Request, tokens: bytes, source: str = "") -> bool:
        """Start a prefetch if it could lengthen the restorable part of `tokens`.

        Returns whether the prefetch began.
        """
        prefixes = self._prefixes
        root = prefixes.tree.roots.get(request.place)
        nodes = [] if root is None else prefixes.walk_to(root, tokens)
        if nodes:
            # Mark the cached path as used, so that pages prefetched for other requests are evicted
            # before it.
            self._clock.tick()
            prefixes.use(nodes[-1])
        keeps = self._store.keeps(request.place, self._requests.generation, source)
        if not keeps or request.prefetch is not None:
            return False
        if self.waiting and len(self.waiting) >= self._config.bounds.prefetches_waiting:
            return False
        operation = self._lookups.plan(request, nodes, tokens, source)
        if operation is None:
            return False
        where = source, operation.anchor.end, operation.floor, operation.end
        self._operation_table.begin(operation, request.id, *where)
        request.prefetch, request.refused = operation.id, False
        # Prefetched pages go under this root, so keep the root even if the request is released
        # meanwhile.
        self._prefixes.join(request.place)
        self.waiting.append(operation)
        self.begin_waiting()
        return True

    def begin_waiting(self) -> None:
        """Start waiting prefetches, lowest id first, while prefetch slots and the page budget allow."""
        config = self._config
        while (
            self.waiting and self._operation_table.prefetch_slots_taken < config.bounds.prefetches
        ):
            operation = self.waiting[0]
            pages = max(1, len(operation.keys))
            if self.budget_used and self.budget_used + pages > config.prefetch_pages_max:
                return
            self.waiting.popleft()
            self._set_budget(operation, pages)
            self._operation_table.vote(operation, _QUERY, UNBOUNDED)
            timeout_s, source = config.timeouts.lookup_s, operation.source
            order = LookUp(operation.id, operation.floor, operation.needs, timeout_s, source)
            self._outbox.orders.append(order)

    def expire_waiting(self) -> None:
        """End prefetches that have waited longer than the stop policy's cap.

        The deadline of a prefetch starts only when it runs. Without the cap, a prefetch far back in the
        queue of a slow store would wait until many deadlines have passed, one after the other.
        """
        now_ms, cap_s = self._clock.agreed_ms, self._config.stop_policy.cap_s
        while self.waiting:
            oldest = self.waiting[0]
            oldest.waits_since_ms = oldest.waits_since_ms or now_ms
            if now_ms - oldest.waits_since_ms <= cap_s * 1000:
                return
            self.waiting.popleft()
            self._finish(oldest, Outcome.EXPIRED, MissReason.LATE)

    def found(self, verdict: PrefetchFound) -> None:
        """Apply the combined lookup results of all ranks."""
        operation = self.has_slot(verdict.operation)
        if operation is None or operation.phase not in _LOOKING or verdict.bound != operation.bound:
            return
        if verdict.pages is None:
            if verdict.expired_rank is not None:
                self._lacks(operation, verdict.expired_rank, 0, "lookup timed out")
                self._end_query(operation, Outcome.MISS, MissReason.LATE)
            return
        request = self._requests.get(operation.request)
        if request is not None and operation.source and not verdict.pages:
            request.refused = verdict.expired_rank is not None
        longest = verdict.longest or 0
        if operation.phase is _QUERY:
            self._note_first_lacking(operation, verdict)
            stored = longest + operation.floor - operation.anchor.end
            self._seen.stored(operation.keys[: max(0, stored)])
        why = MissReason.ONE_RANK_LACKS_IT if verdict.pages < longest else MissReason.NOT_STORED
        if not verdict.pages:
            self._end_query(operation, Outcome.MISS, why)
        elif len(operation.needs) > 1 and verdict.pages != longest:
            self._vote_again(operation, verdict.pages)
        else:
            self._transfer(operation, verdict.pages, why)

    def arrived(self, verdict: PrefetchArrived) -> None:
        """Apply the progress of all ranks' reads.

        A prefetch is complete when every object of every pool has landed on every rank (incident C).
        """
        operation = self.has_slot(verdict.operation)
        if operation is None or operation.phase is not _TRANSFER:
            return
        total = operation.wanted_count
        if verdict.pages > operation.landed:
            operation.landed = min(verdict.pages, total)
        if operation.landed == total:
            self._settle(operation, None)
        elif verdict.ceiling is not None and operation.landed >= verdict.ceiling:
            if operation.skips_known_misses:
                component, key = operation.wanted_keys()[verdict.ceiling]
                self._store.remember_miss(self._prefixes.components[component].pool, key)
            self._lacks(operation, verdict.ceiling_rank, verdict.ceiling, "could not be read")
            self._settle(operation, MissReason.UNREADABLE)
        elif verdict.expired_rank is not None:
            self._lacks(operation, verdict.expired_rank, operation.landed, "timed out")
            self._settle(operation, MissReason.LATE)

    def looks_up(self, name: str) -> bool:
        """Return whether the lookup of a request's prefetch is still running. Changes nothing."""
        request = self._requests.get(name)
        operation = None if request is None else self.has_slot(request.prefetch or 0)
        return operation is not None and operation.phase in _LOOKING

    def stop(self, request: Request) -> None:
        """End the request's prefetch, if any; pages that have landed on every rank stay cached."""
        if request.prefetch is None:
            return
        operation = self._operation_table.in_flight[request.prefetch]
        assert isinstance(operation, Prefetch)
        if operation.phase is Phase.WAITING:
            self.waiting.remove(operation)
            self._finish(operation, Outcome.ABORTED, MissReason.ABANDONED)
        else:
            self._cut_short(operation)

    def quiet(self, operation: Prefetch) -> None:
        """Finish a prefetch whose pages no rank's I/O touches any more."""
        self._set_budget(operation, 0)
        self._operation_table.finish(operation)
        self.begin_waiting()

    def quarantined(self, operation: Prefetch) -> None:
        """Take a quarantined prefetch out of the prefetch budget; quarantine has its own bound."""
        self._set_budget(operation, 0)

    def abandon(self) -> None:
        """End all prefetches from the store because it is detached; insert pages that have landed."""
        waiting, self.waiting = self.waiting, deque(each for each in self.waiting if each.source)
        for operation in waiting:
            if not operation.source:
                self._finish(operation, Outcome.ABORTED, MissReason.ABANDONED)
        for operation in self.active:
            if not operation.source:
                self._cut_short(operation)

    def _cut_short(self, operation: Prefetch) -> None:
        if operation.phase is _TRANSFER:
            self._settle(operation, MissReason.ABANDONED)
        else:
            self._end_query(operation, Outcome.ABORTED, MissReason.ABANDONED)

    def _vote_again(self, operation: Prefetch, bound: int) -> None:
        """Let the ranks vote again, on lengths of at most `bound` pages, or count a miss.

        The prefetch is a miss after `VOTES_MAX` votes without agreement.
        """
        operation.votes += 1
        if operation.votes >= VOTES_MAX:
            self._end_query(operation, Outcome.MISS, MissReason.ONE_RANK_LACKS_IT)
        else:
            self._operation_table.vote(operation, Phase.RESTORABLE, bound)

    def _transfer(self, operation: Prefetch, agreed: int, why: MissReason) -> None:
        """Allocate host pages for the agreed length, or for as many pages as fit, and start to read.

        `why` is the reason to report if the agreed length is shorter than requested.
        """
        length = min(agreed, operation.end - operation.floor)
        fits = self._lookups.room_for(operation, length)
        if length and not fits:
            self._end_query(operation, Outcome.NO_ROOM, MissReason.NO_ROOM)
            return
        if fits < length and len(operation.needs) > 1:
            # Vote again on lengths that fit in host memory, because the longest of them may not be
            # restorable.
            self._vote_again(operation, fits)
            return
        positions = self._lookups.positions(operation, fits)
        operation.goal = operation.floor + fits
        counts = self._counts(operation, positions)
        taken = self._prefixes.allocator.take(HOST, counts)
        if taken is None:
            self._end_query(operation, Outcome.NO_ROOM, MissReason.NO_ROOM)
            return
        transfers = self._assign(operation, positions, taken)
        if not transfers:
            # Nothing is left to read: all pages of the prefetch have reached host memory meanwhile.
            self._settle(operation, None)
            return
        if operation.goal < operation.end:
            self._misses(operation, operation.goal, why if fits == length else MissReason.NO_ROOM)
        self._set_budget(operation, len(positions[0]) or 1)
        self._operation_table.vote(operation, _TRANSFER, UNBOUNDED, operation.goal)
        timeout_s = self._config.stop_policy.timeout_s(fits * self._config.page_tokens)
        self._outbox.orders.append(Fetch(operation.id, transfers, timeout_s, operation.source))

    def _settle(self, operation: Prefetch, why: MissReason | None) -> None:
        """Insert pages that landed on every rank; free the others once no rank's I/O touches them.

        `why` is the reason why some pages have not landed; None if all have.
        """
        reached = self._give_landed(operation)
        request = self._requests.get(operation.request)
        is_for = request is not None and request.prefetch == operation.id
        if request is not None and is_for and reached > operation.floor:
            first, last = request.fetched
            began = min(operation.floor, operation.anchor.end)
            request.fetched = (first if last == began else began, reached)
            request.source = operation.source
        if why is None:
            self._finish(operation, _COMPLETE if reached == operation.end else Outcome.PARTIAL)
            return
        self._misses(operation, reached, why, operation.goal)
        self._step_down(operation)
        self._operation_table.release_locks(operation)
        outcome = Outcome.PARTIAL if operation.landed else Outcome.MISS
        self._operation_table.stop(operation, outcome)

    def _give_landed(self, operation: Prefetch) -> int:
        """Insert the landed pages; return the position up to which a match can now reach.

        The operation continues to own the pages that were not inserted.
        """
        anchor = operation.anchor
        landed, wanted = operation.landed, operation.wanted
        if wanted and not wanted[0].component:
            full, others = wanted[0].pages[:landed], wanted[1:]
        else:
            full, others = page_run(), wanted
        self._clock.tick()
        node = self._insert(operation, anchor, full) if full else anchor
        reached = anchor.end + len(full)
        if landed >= operation.wanted_count:
            reached = operation.goal
            if node.end != reached:
                node = self._node_at(node, reached)
            for each in others:
                pages = dict(zip(each.positions, each.pages, strict=True))
                self._fill(operation, self._prefixes.components[each.component], node, pages)
            operation.assign(())
        else:
            if len(operation.needs) > 1:
                reached = operation.floor
            operation.drop(len(full))
        if not full:
            self._prefixes.use(node)
        return reached

    def _node_at(self, node: Node, end: int) -> Node:
        """Return the node that ends at position `end` of the path to `node`; split a node if needed."""
        self._prefixes.cut(node, end)
        return next((each for each in node.path() if each.end == end), node)

    def _insert(self, operation: Prefetch, anchor: Node, pages: PageRun) -> Node:
        """Insert full-attention pages below `anchor`; return the node at which they end.

        The path is marked as used before the new node is added, so that the new node is evicted last.
        """
        prefixes, allocator = self._prefixes, self._prefixes.allocator
        step = prefixes.tree.page_bytes
        tokens = operation.tokens[: len(pages) * step]
        node, at = anchor, 0
        for existing in prefixes.walk_to(anchor, tokens):
            self._give(operation, existing, 0, pages[at : at + existing.width])
            at += existing.width
            node = existing
        prefixes.use(node)
        if at < len(pages):
            node = prefixes.add(node, tokens[at * step :])
            node.keys = list(operation.keys[at : len(pages)])
            self._is_stored(operation, node, 0)
            allocator.attach(node, HOST, 0, pages[at:], Cause.FETCHED)
        return node

    def _fill(
        self, operation: Prefetch, component: Component, last: Node, pages: dict[int, int]
    ) -> None:
        """Attach a component's pages, keyed by position, to the nodes that lack them."""
        if not pages:
            return
        if component.per_page:
            self._prefixes.cut(last, component.needed_from(last.end))
        start = component.needed_from(last.end)
        for node in last.path_down():
            if node.end <= start:
                continue
            positions = range(node.start, node.end) if component.per_page else (node.end - 1,)
            mine = page_run(pages.pop(each) for each in positions if each in pages)
            self._give(operation, node, component.index, mine)
        if pages:
            raise InternalError(f"no node covers the {component.pool} pages at {sorted(pages)}")

    def _give(self, operation: Prefetch, node: Node, index: int, pages: PageRun) -> None:
        """Attach pages of a component to a node, or free them if the node has some already."""
        allocator, component = self._prefixes.allocator, self._prefixes.components[index]
        if node.values[HOST][index] is None and len(pages) == component.pages_of(node.width):
            allocator.attach(node, HOST, index, pages, Cause.FETCHED)
            self._is_stored(operation, node, index)
        else:
            allocator.pools[HOST][index].give_back(pages)

    def _is_stored(self, operation: Prefetch, node: Node, index: int) -> None:
        """Record that the store has a node's pages, unless they were read from another group."""
        if not operation.source:
            self._store.note_read(node, index)

    def _counts(self, operation: Prefetch, positions: Sequence[Sequence[int]]) -> list[int]:
        counts = [0] * len(self._prefixes.components)
        for component, at in zip(operation.components, positions, strict=True):
            counts[component.index] = len(at)
        return counts

    def _assign(
        self,
        operation: Prefetch,
        positions: Sequence[Sequence[int]],
        taken: Sequence[PageRun],
    ) -> tuple[ObjectTransfer, ...]:
        wanted: list[WantedPages] = []
        transfers: list[ObjectTransfer] = []
        parts = zip(operation.components, operation.needs, positions, strict=True)
        for component, need, at in parts:
            if at:
                keys, pages = need.keys_at(at), taken[component.index]
                wanted.append(WantedPages(component.index, at, keys, pages))
                transfers.append(ObjectTransfer(need.pool, keys, tuple(pages)))
        operation.assign(wanted)
        return tuple(transfers)

    def _end_query(self, operation: Prefetch, outcome: Outcome, why: MissReason) -> None:
        self._misses(operation, min(operation.floor, operation.anchor.end), why)
        self._step_down(operation)
        self._set_budget(operation, 0)
        self._operation_table.drop_lookup(operation, outcome)
        self.begin_waiting()

    def _finish(self, operation: Prefetch, outcome: Outcome, why: MissReason | None = None) -> None:
        if why is not None:
            self._misses(operation, operation.floor, why)
        self._step_down(operation)
        self._set_budget(operation, 0)
        self._operation_table.finish(operation, outcome)
        self.begin_waiting()

    def _step_down(self, operation: Prefetch) -> None:
        """Detach an ended or stopped prefetch from its request, and release its tree's root."""
        self._prefixes.leave(operation.anchor.place)
        request = self._requests.get(operation.request)
        if request is not None and request.prefetch == operation.id:
            request.prefetch = None

    def _set_budget(self, operation: Prefetch, pages: int) -> None:
        self.budget_used += pages - operation.budget
        operation.budget = pages

    def _misses(
        self, operation: Prefetch, reached: int, why: MissReason, end: int | None = None
    ) -> None:
        short = (operation.end if end is None else end) - reached
        if short <= 0:
            return
        self._outbox.events.append(Missed(operation.request, short, why))
        request = self._requests.get(operation.request)
        if request is not None and why is MissReason.NO_ROOM:
            request.sought = request.sought._replace(no_room=True)

    def _note_first_lacking(self, operation: Prefetch, verdict: PrefetchFound) -> None:
        """Record the first page that some rank's store lacks, if the lookup results show it."""
        page = (verdict.pages or 0) + operation.floor - operation.anchor.end
        if not 0 <= page < len(operation.keys):
            return
        if verdict.pages != verdict.longest:
            self._lacks(operation, verdict.shortest_rank, page, OTHERS_HAVE_IT)
        if len(operation.needs) == 1 and operation.skips_known_misses:
            self._store.remember_absence(operation.keys[page])

    def _lacks(self, operation: Prefetch, rank: int | None, page: int, reason: str) -> None:
        known = [key for _, key in operation.wanted_keys()] or operation.keys
        key = known[page] if page < len(known) else b""
        event = MissingOnRank(operation.id, operation.request, rank, page, key, reason)
        self._outbox.events.append(event)
