"""Device pages owned by the replica: admission, insertion, retraction.

`load_back` admits a request, all or nothing: it locks the cached prefix on the device, starts to load
the rest from host memory, and reserves pages to compute into. `insert` gives computed pages to the
tree, where they are shared, backed up under the write policy, and locked for the request.

A request updates its recurrent state in place, in a working slot. When an insert ends at a checkpoint,
the working state is copied to the tree. A request that continues from a checkpoint copies that state to
its working slot.
"""

from collections.abc import Sequence

from ....coordinator.operation import OperationKind, Outcome
from ....errors import UsageError
from ...protocol.answers import Admission, Wait
from ...protocol.events import Cause, Hit
from ...protocol.orders import Fork
from ..core.pages import PageRun, page_run
from ..core.replica_parts import ReplicaParts
from ..operations.backing_up import BackingUp
from ..operations.kinds import Copy, LoadBack, Resume, Retract
from ..operations.lent import NO_PAGE
from ..operations.loading_back import LoadingBack, TailPages
from ..operations.operation_table import OperationTable
from ..operations.requests import LoadState, OwnedRequest, Request, RequestEvent, Requests, Stage
from ..operations.retraction import Retraction
from ..tree.components import RecurrentComponent
from ..tree.matching import Missing, lacking, match, reach
from ..tree.node import DEVICE, HOST, Node, TreeIdentity
from ..tree.prefixes import Prefixes
from ..tree.ref_counts import LockHandle
from ..tree.tokens import TOKEN_BYTES
from .device import Follows

_READY = Stage.READY


class OwnedDevice:
    """Admits requests, inserts computed pages, and releases pages."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        requests: Requests,
        loading_back: LoadingBack,
        backing_up: BackingUp,
        saving: Retraction,
    ) -> None:
        self._page_tokens = basis.config.page_tokens
        self._clock = basis.clock
        self._prefixes = prefixes
        self._tree = prefixes.tree
        self._allocator = prefixes.allocator
        self._components = prefixes.components
        self._paged = [each for each in prefixes.components if each.per_page]
        self._states = [
            each for each in prefixes.components if isinstance(each, RecurrentComponent)
        ]
        self._operation_table = operation_table
        self._requests = requests
        self._loading_back = loading_back
        self._backing_up = backing_up
        self._saving = saving
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._seen = basis.misses
        self._least_pages = min(
            self._allocator.pools[DEVICE][each.index].capacity for each in self._paged
        )
        """The capacity in pages of the smallest device pool, leaving out the pools of recurrent states.
        """

    def follows(self) -> dict[OperationKind, Follows]:
        finish = self._operation_table.finish
        return {
            OperationKind.LOAD_BACK: Follows(finish, self._loaded, self._load_failed),
            OperationKind.RESUME: Follows(finish, self._resumed, self._load_failed),
            OperationKind.RETRACT: Follows(finish, self._saving.ended, self._save_failed),
        }

    def load_state(self, request: Request) -> LoadState:
        state = request.load_state
        if state is None:
            raise UsageError(
                f"request {request.id!r} is not admitted; call load_back until it returns no Wait"
            )
        return state

    def quarantined(self, operation: Copy) -> None:
        """Do nothing: a quarantined copy owns its pages, so no request waits for the copy."""

    def after_verdict(self) -> None:
        """Do nothing: without lent pages, the pages of a released request are free at once."""

    def release(self, request: Request) -> bool:
        self._saving.let_go(request)
        self._requests.leave(request)
        return True

    def require_possible(
        self, name: str, place: TreeIdentity, tokens: bytes, reserve_tokens: int
    ) -> None:
        """Raise `UsageError` for a request that needs more pages than an empty device has.

        Such a request would wait forever. Cached window pages count only if a match needs them. Changes
        nothing.
        """
        reserved = -(-reserve_tokens // self._page_tokens)
        if max(len(tokens) // self._tree.page_bytes, reserved) > self._least_pages:
            found = match(self._prefixes, place, tokens).host_tokens // self._page_tokens
            self._require_room_for(name, found, reserved)

    def admit(
        self, request: OwnedRequest, tokens: bytes, reserve_tokens: int, priority: int = 0
    ) -> Admission | Wait:
        """Admit a request: lock, load back and reserve its pages; or return why it has to wait."""
        prefixes = self._prefixes
        root = prefixes.root(request.place)
        nodes = prefixes.walk_to(root, tokens)
        on_device, end = self._reach(nodes)
        best = root if not end else next(node for node in reversed(nodes) if node.end == end)
        prefixes.cut_for(best)
        # If the device has the whole prefix, skip the search for missing pages.
        missing = [] if on_device == end else lacking(self._components, best, DEVICE)
        for node, index in missing:
            if node.is_to_have(DEVICE, index):
                return Wait.LOADING
        reserved = max(0, -(-reserve_tokens // self._page_tokens) - end)
        pages = self._take(best, missing, self._room_of(reserved))
        if pages is None:
            return Wait.NO_ROOM
        loading, request.own, request.locks = pages
        self._requests.move(request, RequestEvent.ADMIT)
        request.prefix, request.node, request.priority = end, best, priority
        request.checkpoints = request.ends = frozenset()
        if len(self._components) > 1:
            self._note_stops(request, nodes[-1].end if nodes else 0, tokens)
        self._clock.tick()
        prefixes.use(best, hits=1, priority=priority)
        self._journal.record("admit", request.id, on_device, end, reserve_tokens, priority)
        if missing:
            # List the missing pages again, because the allocation may have split nodes. The order of
            # the pages stays the same.
            missing = lacking(self._components, best, DEVICE)
            self._loading_back.begin(request, best, missing, loading)
        elif self._states:
            self._fork(request)
        self._backing_up.back_up_if_hit_often(best)
        return self._admission(request, on_device, tokens)

    def extend(self, request: OwnedRequest, total_tokens: int) -> bool:
        """Reserve pages for `total_tokens` tokens of a request; return False if too few are left."""
        self._require_ready(request)
        total = -(-total_tokens // self._page_tokens)
        self._journal.record("extend", request.id, total_tokens)
        missing = total - request.prefix - len(request.own[0])
        if missing <= 0:
            return True
        counts = [missing if component.per_page else 0 for component in self._components]
        taken = self._allocator.take(DEVICE, counts)
        if taken is None:
            return False
        for own, pages in zip(request.own, taken, strict=True):
            own.extend(pages)
        return True

    def insert(self, request: OwnedRequest, tokens: bytes, *, final: bool) -> int:
        """Insert whole pages of `tokens` into the tree; return how many tokens are in the tree.

        If `final`, the end of `tokens` is recorded as a match end in a model with windows.
        """
        self._require_ready(request)
        prefixes, page_bytes, prefix = self._prefixes, self._tree.page_bytes, request.prefix
        pages = len(tokens) // page_bytes
        self._require_pages(request, pages)
        if pages < prefix:
            raise UsageError(
                f"request {request.id!r} inserts {pages} pages, and already shares {prefix}"
            )
        root = prefixes.root(request.place)
        found = self._tree.follow(root, tokens)
        if prefix and request.node not in found[0]:
            raise UsageError(
                f"request {request.id!r} inserts other tokens than those that it was admitted with"
            )
        digest = self._requests.digest_pages("insert", request.id, tokens, int(final))
        self._seen.computed(request.place, digest)
        self._clock.tick()
        nodes = prefixes.cut_to(*found)
        node = nodes[-1] if nodes else root
        if node.end > prefix:
            for each in nodes:
                if each.end > prefix:
                    self._publish(request, each)
        if node.end < pages:
            node = prefixes.add(node, tokens[node.end * page_bytes : pages * page_bytes])
            self._publish(request, node)
        self._extend_lock(request, node)
        prefixes.use(node, priority=request.priority)
        if node.parent is not None:
            if len(self._paged) > 1:
                self._note_ends(request, node, final=final)
            if self._states and len(tokens) == pages * page_bytes:
                self._keep_state(request, node)
            self._backing_up.was_computed(node)
        return pages * self._page_tokens

    def page_table(self, request: OwnedRequest, pool: str) -> PageRun:
        """Return the device pages of one pool for a ready request, in token order; see `Cache`."""
        self._require_ready(request)
        component = next((c for c in self._components if c.pool == pool), None)
        if component is None:
            known = ", ".join(each.pool for each in self._components)
            raise UsageError(f"there is no pool {pool!r}; known: {known}")
        if not component.per_page:
            return page_run(request.own[component.index])
        table = page_run()
        start = component.needed_from(request.prefix)
        if request.node is not None:
            for node in request.node.path_down():
                pages = node.values[DEVICE][component.index] if node.start >= start else None
                table.extend([NO_PAGE] * node.width if pages is None else pages)
        table.extend(request.own[component.index])
        return table

    def retract(self, request: OwnedRequest, tokens: bytes) -> bool:
        """Save all pages of a request to host memory; its device pages are freed when the copy is done.

        `tokens` are all computed tokens; their whole pages are inserted into the tree. Returns False if
        host memory has no room; the inserted pages then stay in the tree.
        """
        self._require_ready(request)
        self._require_pages(request, -(-len(tokens) // self._tree.page_bytes))
        self.insert(request, tokens, final=False)
        node = request.node
        assert node is not None
        tail = self._tail(request, len(tokens))
        pins = self._saving.begin(request, tokens, node, tail)
        if pins is None:
            return False
        # Take the partial last page and the state from the request, because the retract operation owns
        # them now.
        request.own = [run[len(part) :] for run, part in zip(request.own, tail, strict=True)]
        self._saving.let_go(request)
        request.locks, request.node, request.prefix = pins, node, node.end
        return True

    def resume(self, request: OwnedRequest, reserve_tokens: int) -> Admission | Wait:
        """Load a retracted request back to the device, or return why it has to wait."""
        self._require_room_for(request.id, request.prefix, -(-reserve_tokens // self._page_tokens))
        if request.stage is not Stage.SAVED or request.node is None:
            raise UsageError(f"request {request.id!r} is not retracted; nothing can be resumed")
        wait = self._bring_back(request, request.node, reserve_tokens)
        if wait is Wait.LOST:
            # The request cannot be resumed: host memory lacks a page of the request's shared prefix,
            # because another request's backup of that page has failed.
            self._saving.lose(request, RequestEvent.LOSE)
        if wait is not None:
            return wait
        return Admission(
            device_tokens=0,
            host_tokens=request.computed,
            storage_tokens=0,
            operation=request.waits_for,
        )

    def _bring_back(self, request: OwnedRequest, node: Node, reserve_tokens: int) -> Wait | None:
        """Load the prefix that ends at `node` and the request's saved pages.

        Returns None if the load has begun, else the reason to wait or `Wait.LOST`.
        """
        assert request.saved is not None
        saved = request.saved
        self._prefixes.cut_for(node)
        missing = lacking(self._saving.shared, node, DEVICE)
        if any(each.is_to_have(DEVICE, index) for each, index in missing):
            return Wait.LOADING
        if any(each.values[HOST][index] is None for each, index in missing):
            return Wait.LOST
        reserved = -(-reserve_tokens // self._page_tokens) - node.end
        room = [
            max(len(host), reserved) if component.per_page else 1
            for component, host in zip(self._components, saved, strict=True)
        ]
        pages = self._take(node, missing, room)
        if pages is None:
            return Wait.NO_ROOM
        loading, own, locks = pages
        self._allocator.release(request.locks)
        request.locks, request.saved = locks, None
        tail = [run[: len(host)] for run, host in zip(own, saved, strict=True)]
        request.own = [run[len(host) :] for run, host in zip(own, saved, strict=True)]
        self._clock.tick()
        self._prefixes.use(node)
        missing = lacking(self._saving.shared, node, DEVICE)
        self._loading_back.begin(request, node, missing, loading, TailPages(tail, saved))
        return None

    def _reach(self, nodes: list[Node]) -> tuple[int, int]:
        """Return two positions up to which a request can reuse a path: (device end, restorable end).

        Up to the device end, the device has all needed pages. The restorable end is the end of
        `best_match_node`. A load back ends there, not at the deepest cached node, because a match may
        end only where every component accepts it (incident B).
        """
        device, best, _ = reach(self._prefixes.needs, nodes)
        return device, best

    def _room_of(self, pages: int) -> list[int]:
        room = [pages] * len(self._components)
        for each in self._states:
            room[each.index] = 1
        return room

    def _take(
        self, best: Node, missing: list[Missing], room: list[int]
    ) -> tuple[Sequence[PageRun], list[PageRun], list[LockHandle]] | None:
        """Lock a request's prefix and allocate its device pages; return None if there is no room.

        `best` is the last node of the prefix. `missing` are the (node, component) pairs to load, and
        `room` is the number of own pages by component. Returns (pages to load into, the request's own
        pages, lock handles), both kinds of pages by component. The prefix is locked and pinned first,
        so that the allocation cannot evict it.
        """
        allocator = self._allocator
        locks = allocator.hold(DEVICE, best, requested=True)
        if not (missing or any(room)):
            return (), [page_run() for _ in room], locks
        loading = [0] * len(room)
        for node, index in missing:
            loading[index] += self._components[index].pages_of(node.width)
        counts = [load + own for load, own in zip(loading, room, strict=True)]
        if self._allocator.has_free(DEVICE, counts):
            taken = self._allocator.take(DEVICE, counts)
        else:
            guards = allocator.hold(DEVICE, best) + allocator.hold(HOST, best)
            taken = self._allocator.take(DEVICE, counts)
            allocator.release(guards)
        if taken is None:
            allocator.release(locks)
            return None
        parts = list(zip(taken, loading, strict=True))
        return [run[:count] for run, count in parts], [run[count:] for run, count in parts], locks

    def _admission(self, request: OwnedRequest, device: int, tokens: bytes) -> Admission:
        unit, best, (start, stop) = self._page_tokens, request.prefix, request.fetched
        fetched = max(0, min(best, stop) - max(device, start)) if stop else 0
        on_device, from_host = device * unit, (best - device - fetched) * unit
        missed, seen = self._seen.count(request.place, tokens, unit, best * unit, request.sought)
        stored, requested = fetched * unit, len(tokens) // TOKEN_BYTES
        hit = Hit(request.id, requested, on_device, from_host, stored, missed, request.source)
        request.counted = hit, seen
        if request.waits_for is None:
            self._report_lookup(request)
        stops = self._stops(request, tokens) if self._states else ()
        return Admission(on_device, from_host, stored, request.waits_for, stops)

    def _report_lookup(self, request: OwnedRequest) -> None:
        assert request.counted is not None
        (hit, seen), request.counted = request.counted, None
        self._outbox.events.append(hit)
        self._seen.record_lookup(seen)
        request.forget_sources()

    def _note_stops(self, request: OwnedRequest, branch: int, tokens: bytes) -> None:
        """Record where to keep the request's state, and where matches of other requests may end.

        Both are positions in pages. `branch` is the position at which the request's tokens diverge from
        the tree.
        """
        positions = frozenset((branch, len(tokens) // self._tree.page_bytes))
        if self._states:
            request.checkpoints = frozenset(each for each in positions if each > request.prefix)
        if len(self._paged) > 1:
            request.ends = positions - {0}

    def _stops(self, request: OwnedRequest, tokens: bytes) -> tuple[int, ...]:
        """Return the token positions after the cached prefix at which the tree can keep a state."""
        best, last = request.prefix, len(tokens) // self._tree.page_bytes
        positions = set(request.checkpoints)
        for component in self._states:
            every = component.checkpoint_pages
            positions |= set(range(best - best % every + every, last + 1, every))
        return tuple(position * self._page_tokens for position in sorted(positions))

    def _keep_state(self, request: OwnedRequest, node: Node) -> None:
        """Copy the request's working state to the tree, if the node ends at a checkpoint.

        If no slot is free, the checkpoint is skipped; a later request may then miss there.
        """
        for component in self._states:
            index = component.index
            regular = not node.end % component.checkpoint_pages
            if node.values[DEVICE][index] is not None or not (
                regular or node.end in request.checkpoints
            ):
                continue
            counts = [int(each is component) for each in self._components]
            taken = self._allocator.take(DEVICE, counts)
            if taken is not None:
                slot = taken[index]
                self._allocator.attach(node, DEVICE, index, slot, Cause.COMPUTED)
                self._outbox.orders.append(Fork(component.pool, request.own[index][0], slot[0]))

    def _fork(self, request: OwnedRequest) -> None:
        """Copy the state at the end of the cached prefix to the request's working slot."""
        node = request.node
        if node is None or node.parent is None:
            return
        for component in self._states:
            source = node.values[DEVICE][component.index]
            assert source is not None
            working = request.own[component.index][0]
            self._outbox.orders.append(Fork(component.pool, source[0], working))

    def _note_ends(self, request: OwnedRequest, node: Node, *, final: bool) -> None:
        passed = [position for position in request.ends if position <= node.end]
        for position in sorted(passed):
            self._prefixes.note_end(node, position)
        request.ends -= frozenset(passed)
        if final:
            node.is_match_end = True

    def _publish(self, request: OwnedRequest, node: Node) -> None:
        """Give a node the request's computed pages, or free them if the node already has pages."""
        count = node.end - request.prefix
        own = request.own = list(request.own)
        for component in self._paged:
            index = component.index
            mine, own[index] = own[index][:count], own[index][count:]
            if node.values[DEVICE][index] is None:
                self._allocator.attach(node, DEVICE, index, mine, Cause.COMPUTED)
            else:
                self._allocator.pools[DEVICE][index].give_back(mine)
        request.prefix = node.end

    def _extend_lock(self, request: OwnedRequest, node: Node) -> None:
        self._prefixes.cut_for(node)
        if request.locks:
            request.locks = self._allocator.extend(request.locks, node)
        else:
            request.locks = self._allocator.hold(DEVICE, node, requested=True)
        request.node, request.prefix = node, node.end

    def _loaded(self, operation: LoadBack) -> None:
        request = self._loading_back.settle(operation)
        if isinstance(request, OwnedRequest):
            self._fork(request)
            self._report_lookup(request)
        self._operation_table.finish(operation, Outcome.COMPLETE)

    def _resumed(self, operation: Resume) -> None:
        request = self._loading_back.settle(operation)
        if isinstance(request, OwnedRequest):
            own = enumerate(request.own)
            request.own = [operation.disown(DEVICE, index) + run for index, run in own]
        self._operation_table.finish(operation, Outcome.COMPLETE)

    def _load_failed(self, operation: LoadBack | Resume) -> None:
        """Remove the source pages of a failed load from the tree, and let the request compute again."""
        self._loading_back.note_failed(operation)
        self._lose(operation)
        self._loading_back.failed(operation)

    def _save_failed(self, operation: Retract) -> None:
        self._lose(operation)
        self._operation_table.stop(operation, Outcome.FAILED)

    def _lose(self, operation: LoadBack | Resume | Retract) -> None:
        request = self._requests.waiting_for(operation.request, operation)
        if request is not None:
            self._saving.lose(request, RequestEvent.FAIL)

    def _tail(self, request: OwnedRequest, computed_bytes: int) -> list[PageRun]:
        """Return, by component, the request's unshared pages with data: a partial page or the state."""
        begun_page = int(computed_bytes > request.prefix * self._tree.page_bytes)
        # If no tokens were computed, there is no state to save.
        has_state = int(computed_bytes > 0)
        return [
            request.own[component.index][: begun_page if component.per_page else has_state]
            for component in self._components
        ]

    def _require_ready(self, request: OwnedRequest) -> None:
        if request.stage is not _READY and self.load_state(request) is not LoadState.READY:
            raise UsageError(
                f"request {request.id!r} is not ready; its load back has not settled: step while"
                " `load_state` is LOADING"
            )

    def _require_pages(self, request: OwnedRequest, pages: int) -> None:
        room = request.prefix + len(request.own[0])
        if pages > room:
            raise UsageError(
                f"request {request.id!r} has filled {pages} pages and reserved {room}; call extend"
                " before the tokens are computed"
            )

    def _require_room_for(self, name: str, cached: int, reserved: int) -> None:
        """Raise `UsageError` if a request does not fit an empty device.

        The request has `cached` cached pages, and is to have `reserved` pages in all.
        """
        for component in self._paged:
            pool = self._allocator.pools[DEVICE][component.index]
            # Count the cached pages that a match needs, and the pages to be computed after them.
            needed = max(cached, reserved) - component.needed_from(cached)
            if needed > pool.capacity:
                raise UsageError(
                    f"request {name!r} needs {needed} {pool.name} pages of {self._page_tokens}"
                    f" tokens, and there are {pool.capacity} in all: it can never be admitted; refuse"
                    " it, reserve less at a time, or open the cache with more device pages"
                )
