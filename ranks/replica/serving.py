"""What a request does with the cache: match, load back, reserve, insert, release.

A request is admitted by `load_back`: its device prefix is locked, what host memory has beyond it is
on its way, and the pages that it will compute into are reserved. All of it happens or nothing does.
"""

from dataclasses import dataclass
from enum import StrEnum

from ...errors import UsageError
from ..orders import Fork
from .backing_up import BackingUp
from .components.recurrent import Recurrent
from .holds import Receipt
from .loading_back import LoadingBack
from .matching import Missing, lacking, reach
from .operations import Copy
from .pages import PageRun, page_run
from .request import Request
from .state import ReplicaState
from .tree import DEVICE, HOST, Node

NO_PAGE = -1
"""Stands in a page table where a request has no page any more."""


class Wait(StrEnum):
    """Why a request was not admitted. Nothing has changed; ask again at a later step."""

    NO_ROOM = "no_room"
    """Too few device pages are free or can be evicted. There are enough once others let go."""
    LOADING = "loading"
    """Another request is loading back pages that this one needs too."""
    LOST = "lost"
    """What was retracted is gone: `load_back` the request again, and compute what is missing."""


class LoadState(StrEnum):
    """How far an admitted request's pages have come."""

    LOADING = "loading"
    """Pages are on their way from host memory."""
    SAVING = "saving"
    """The request is on its way to host memory."""
    SAVED = "saved"
    """The request is in host memory, and nothing of it on the device; `resume` brings it back."""
    READY = "ready"
    """All pages of the prefix are on the device; the engine may compute."""
    FAILED = "failed"
    """The load back failed on some rank. The host pages that failed are dropped, but for those that
    something else needs, and the request is not admitted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Where the cached prefix of an admitted request comes from. Lengths in tokens."""

    device_tokens: int
    """Were on the device already."""
    host_tokens: int
    """Come from host memory, where they were before this request's prefetch."""
    storage_tokens: int
    """Come from host memory, where this request's prefetch brought them from storage."""
    operation: int | None
    """The load back in flight, or None if nothing has to be loaded."""
    checkpoints: tuple[int, ...] = ()
    """Where the engine should end a chunk and `insert`, so that a recurrent state is kept there:
    at the regular distance, where the prompt leaves what is cached, and at its last whole page."""

    @property
    def cached_tokens(self) -> int:
        """The length of the whole cached prefix; the engine computes what follows it."""
        return self.device_tokens + self.host_tokens + self.storage_tokens


class Serving:
    """Admits requests, publishes what they compute, and lets go of what they hold."""

    def __init__(
        self, state: ReplicaState, loading_back: LoadingBack, backing_up: BackingUp
    ) -> None:
        self._state = state
        self._loading_back = loading_back
        self._backing_up = backing_up

    def admit(
        self, request: Request, tokens: bytes, reserve_tokens: int, priority: int = 0
    ) -> Admission | Wait:
        """Lock, load back and reserve for a request, or say why that has to wait."""
        state = self._state
        root = state.root(request.place)
        nodes = state.walk_to(root, tokens)
        on_device, best_end, _ = reach(state.needs, nodes)
        best = next((node for node in nodes if node.end == best_end), root)
        state.cut_for(best)
        missing = lacking(state.components, best, DEVICE)
        if any(self._loading_back.comes_to(each) for each in missing):
            return Wait.LOADING
        reserved = max(0, -(-reserve_tokens // state.config.page_tokens) - best.end)
        room = [reserved if each.per_page else 1 for each in state.components]
        pages = self.take(best, missing, room)
        if pages is None:
            return Wait.NO_ROOM
        loading, own, locks = pages
        # Making room may have cut nodes, which divides what is missing and changes no order.
        missing = lacking(state.components, best, DEVICE)
        request.admitted = True
        request.load_failed = False
        request.prefix, request.node, request.own, request.locks = best.end, best, own, locks
        request.checkpoints = self._checkpoints(nodes[-1].end if nodes else 0, best.end, tokens)
        request.priority = priority
        for node in best.path():
            node.hits += 1
            node.priority = max(node.priority, priority)
        state.tick()
        state.use(best)
        state.journal.record("admit", request.id, on_device, best.end, reserve_tokens, priority)
        if missing:
            self._loading_back.begin(request, best, missing, loading)
        else:
            self._fork_state(request)
        self._backing_up.was_hit(best)
        return self._admission(request, on_device, best.end, tokens)

    def take(
        self, best: Node, missing: list[Missing], room: list[int]
    ) -> tuple[list[PageRun], list[PageRun], list[Receipt]] | None:
        """Take the pages to load into and a request's own (`room`), and lock what it will use.

        What it will use is locked and what is to be loaded is pinned before pages are taken, so that
        taking them cannot evict it.
        """
        state, residence = self._state, self._state.residence
        loading = [0] * len(state.components)
        for node, index in missing:
            loading[index] += state.components[index].pages_of(node.width)
        counts = [load + own for load, own in zip(loading, room, strict=True)]
        locks = residence.hold(DEVICE, best, requested=True)
        if residence.has_free(DEVICE, counts):
            taken = residence.take(DEVICE, counts)
        else:
            guards = residence.hold(DEVICE, best) + residence.hold(HOST, best)
            taken = residence.take(DEVICE, counts)
            for guard in guards:
                residence.holds.release(guard)
        if taken is None:
            for lock in locks:
                residence.holds.release(lock)
            return None
        parts = list(zip(taken, loading, strict=True))
        return [run[:count] for run, count in parts], [run[count:] for run, count in parts], locks

    def loaded(self, operation: Copy) -> None:
        """Apply a load back that has ended on every rank."""
        request = self._loading_back.loaded(operation)
        if request is not None and operation.resumes:
            for component in self._state.components:
                index = component.index
                own = operation.owned.pop((DEVICE, index), page_run())
                request.own[index] = own + request.own[index]
        elif request is not None:
            self._fork_state(request)
        self._loading_back.finish(operation)

    def load_failed(self, operation: Copy) -> None:
        """Apply a load back that failed on some rank: its source is not offered again."""
        request = self._loading_back.request_of(operation)
        if request is not None:
            request.load = None
            request.load_failed = True
            self.let_go(request)
        self._loading_back.failed(operation)

    def extend(self, request: Request, total_tokens: int) -> bool:
        """Reserve device pages until the request has room for `total_tokens` tokens."""
        self._require_ready(request)
        state = self._state
        total = -(-total_tokens // state.config.page_tokens)
        state.journal.record("extend", request.id, total_tokens)
        missing = total - request.prefix - len(request.own[0])
        if missing <= 0:
            return True
        counts = [missing if component.per_page else 0 for component in state.components]
        taken = state.residence.take(DEVICE, counts)
        if taken is None:
            return False
        for own, pages in zip(request.own, taken, strict=True):
            own.extend(pages)
        return True

    def insert(self, request: Request, tokens: bytes, *, final: bool) -> int:
        """Publish the whole pages of `tokens`; return how many tokens the tree now shares."""
        state = self._state
        self._require_ready(request)
        pages = state.tree.whole_pages(tokens)
        self.require_room(request, pages * state.tree.page_bytes)
        if pages < request.prefix:
            raise UsageError(
                f"request {request.id!r} inserts {pages} pages and shares {request.prefix} already"
            )
        self._require_same_prefix(request, tokens)
        state.witness_tokens("insert", request.id, tokens)
        state.journal.record("insert", request.id, pages, int(final))
        state.tick()
        is_at_page = len(tokens) == pages * state.tree.page_bytes
        tokens = tokens[: pages * state.tree.page_bytes]
        root = state.root(request.place)
        nodes = state.walk_to(root, tokens)
        node = nodes[-1] if nodes else root
        for each in nodes:
            if each.end > request.prefix:
                self._publish(request, each)
        if node.end < pages:
            node = state.add(node, tokens[node.end * state.tree.page_bytes :])
            self._publish(request, node)
        self._extend_lock(request, node)
        if request.priority > 0:
            for each in node.path():
                each.priority = max(each.priority, request.priority)
        state.use(node)
        if node.parent is not None:
            if is_at_page:
                self._publish_state(request, node)
            self._backing_up.was_computed(node)
        return pages * state.config.page_tokens

    def page_table(self, request: Request, pool: str) -> PageRun:
        """Return the device pages of a request that is ready, in token order; see `Cache`."""
        self._require_ready(request)
        component = next((c for c in self._state.components if c.pool == pool), None)
        if component is None:
            known = ", ".join(each.pool for each in self._state.components)
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

    def release(self, request: Request) -> None:
        """Give back everything that the request holds, and forget it."""
        self.let_go(request)
        self._state.journal.record("release", request.id)
        self._state.leave(request)

    def load_state(self, request: Request) -> LoadState:
        """Say whether the request's pages are there."""
        if request.load_failed:
            return LoadState.FAILED
        if request.retract is not None:
            return LoadState.SAVING
        if request.saved is not None:
            return LoadState.SAVED
        if not request.admitted:
            raise UsageError(f"request {request.id!r} is not admitted; call load_back first")
        return LoadState.READY if request.load is None else LoadState.LOADING

    def _admission(self, request: Request, device: int, best: int, tokens: bytes) -> Admission:
        unit = self._state.config.page_tokens
        start, stop = request.fetched
        fetched = max(0, min(best, stop) - max(device, start))
        return Admission(
            device_tokens=device * unit,
            host_tokens=(best - device - fetched) * unit,
            storage_tokens=fetched * unit,
            operation=request.load,
            checkpoints=self._stops(request, best, self._state.tree.whole_pages(tokens)),
        )

    def _checkpoints(self, branch: int, best: int, tokens: bytes) -> frozenset[int]:
        """Return where this request keeps a state beside the regular positions."""
        if all(component.per_page for component in self._state.components):
            return frozenset()
        last = self._state.tree.whole_pages(tokens)
        return frozenset(position for position in (branch, last) if position > best)

    def _stops(self, request: Request, best: int, last: int) -> tuple[int, ...]:
        """Return the tokens after which a state can be kept, from `best` up to the page `last`."""
        positions = set(request.checkpoints)
        for component in self._state.components:
            if isinstance(component, Recurrent):
                every = component.checkpoint_pages
                positions |= set(range(best - best % every + every, last + 1, every))
        return tuple(position * self._state.config.page_tokens for position in sorted(positions))

    def _publish(self, request: Request, node: Node) -> None:
        """Give the request's own pages for `node` to it, or back if it has pages already."""
        residence = self._state.residence
        count = node.end - request.prefix
        for component in self._state.components:
            if not component.per_page:
                continue
            index = component.index
            mine, request.own[index] = request.own[index][:count], request.own[index][count:]
            if node.values[DEVICE][index] is None:
                residence.attach(node, DEVICE, index, mine)
            else:
                residence.pools[DEVICE][index].give_back(mine)
        request.prefix = node.end

    def _publish_state(self, request: Request, node: Node) -> None:
        """Copy the state that the request works on to the tree, where a checkpoint is kept.

        If no slot is to be had there is no checkpoint: it costs a later hit and nothing else.
        """
        state = self._state
        for component in state.components:
            if not isinstance(component, Recurrent):
                continue
            index = component.index
            regular = not node.end % component.checkpoint_pages
            if node.values[DEVICE][index] is not None or not (
                regular or node.end in request.checkpoints
            ):
                continue
            slot = state.residence.take_one(DEVICE, index, 1)
            if slot is None:
                continue
            state.residence.attach(node, DEVICE, index, slot)
            state.orders.append(Fork(component.pool, request.own[index][0], slot[0]))

    def _fork_state(self, request: Request) -> None:
        """Copy the state at the end of the cached prefix to the slot that the request works on."""
        node = request.node
        if node is None or node.parent is None:
            return
        for component in self._state.components:
            if component.per_page:
                continue
            source = node.values[DEVICE][component.index]
            assert source is not None
            working = request.own[component.index][0]
            self._state.orders.append(Fork(component.pool, source[0], working))

    def _extend_lock(self, request: Request, node: Node) -> None:
        state = self._state
        state.cut_for(node)
        locks = state.residence.hold(DEVICE, node, requested=True)
        for lock in request.locks:
            state.residence.holds.release(lock)
        request.locks, request.node, request.prefix = locks, node, node.end

    def let_go(self, request: Request) -> None:
        """Give back all that a request holds on either tier; it goes on as one that is not admitted."""
        for lock in request.locks:
            self._state.residence.holds.release(lock)
        if request.node is not None:
            # What was evicted, or could not be copied, may have been kept for it as a tombstone.
            self._state.residence.prune(request.node)
        for index, pages in enumerate(request.own):
            self._state.residence.pools[DEVICE][index].give_back(pages)
            request.own[index] = page_run()
        for index, pages in enumerate(request.saved or ()):
            self._state.residence.pools[HOST][index].give_back(pages)
        request.saved = request.retract = None
        request.locks, request.node, request.prefix, request.admitted = [], None, 0, False
        if request.place.generation != self._state.generation:
            # What was cached before a reset is offered to no request that begins anew.
            self._state.move(request)

    def require_not_admitted(self, request: Request) -> None:
        """Raise `UsageError` for a request that has its pages already."""
        if request.admitted:
            raise UsageError(f"request {request.id!r} is admitted already; release it first")

    def _require_same_prefix(self, request: Request, tokens: bytes) -> None:
        if request.node is None or not request.prefix:
            return
        walk = self._state.tree.walk(self._state.root(request.place), tokens)
        if not any(node is request.node for node in walk.nodes):
            raise UsageError(
                f"request {request.id!r} inserts other tokens than those that it was admitted with"
            )

    def require_room(self, request: Request, computed_bytes: int) -> None:
        """Raise `UsageError` if a request is not ready, or has no pages for so many bytes of tokens."""
        self._require_ready(request)
        pages = -(-computed_bytes // self._state.tree.page_bytes)
        room = request.prefix + len(request.own[0])
        if pages > room:
            raise UsageError(f"request {request.id!r} has filled {pages} pages and has {room}")

    def _require_ready(self, request: Request) -> None:
        if self.load_state(request) is not LoadState.READY:
            raise UsageError(f"request {request.id!r} is not ready; its load back has not settled")
