"""What a request does with the cache: match, load back, reserve, insert, release.

A request is admitted by `load_back`: its device prefix is locked, what host memory has beyond it is
on its way, and the pages that it will compute into are reserved. All of it happens or nothing does.
"""

from dataclasses import dataclass
from enum import StrEnum

from ...errors import UsageError
from .backing_up import BackingUp
from .loading_back import LoadingBack
from .operations import Copy
from .pages import PageRun, page_run
from .request import Request
from .state import ReplicaState
from .tree import DEVICE, HOST, Node


class Wait(StrEnum):
    """Why a request was not admitted. Nothing has changed; ask again at a later step."""

    NO_ROOM = "no_room"
    """Too few device pages are free or can be evicted."""
    LOADING = "loading"
    """Another request is loading back pages that this one needs too."""


class LoadState(StrEnum):
    """How far an admitted request's pages have come."""

    LOADING = "loading"
    """Pages are on their way from host memory."""
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

    def admit(self, request: Request, tokens: bytes, reserve_tokens: int) -> Admission | Wait:
        """Lock, load back and reserve for a request, or say why that has to wait."""
        state = self._state
        if request.admitted:
            raise UsageError(f"request {request.id!r} is admitted already; release it first")
        root = state.root(request.place)
        state.tick()
        nodes = state.walk_to(root, tokens)
        on_device = 0
        while on_device < len(nodes) and nodes[on_device].values[DEVICE][0] is not None:
            on_device += 1
        device_node = nodes[on_device - 1] if on_device else root
        best = nodes[-1] if nodes else root
        missing = nodes[on_device:]
        if any(self._loading_back.comes_to(node) for node in missing):
            return Wait.LOADING
        loading = best.end - device_node.end
        reserved = max(0, -(-reserve_tokens // state.config.page_tokens) - best.end)
        # The holds come first, so that taking pages cannot evict what the request is to use.
        lock = state.holds.acquire(DEVICE, state.component.index, device_node)
        pin = state.holds.acquire(HOST, state.component.index, best)
        pages = state.take(DEVICE, loading + reserved)
        if pages is None:
            state.holds.release(pin)
            state.holds.release(lock)
            return Wait.NO_ROOM
        request.admitted = True
        request.load_failed = False
        request.prefix, request.lock, request.own = device_node.end, lock, pages[loading:]
        state.touch(best)
        state.journal.record("admit", request.id, device_node.end, best.end, reserved)
        if missing:
            self._loading_back.begin(request, missing, pages[:loading])
        state.holds.release(pin)
        return self._admission(request, device_node.end, best.end)

    def loaded(self, operation: Copy) -> None:
        """Apply a load back that has ended on every rank."""
        last = operation.segments[-1].node
        request = self._loading_back.loaded(operation)
        if request is not None:
            self._extend_lock(request, last)
        self._loading_back.finish(operation)

    def load_failed(self, operation: Copy) -> None:
        """Apply a load back that failed on some rank: its source is not offered again."""
        request = self._loading_back.request_of(operation)
        if request is not None:
            request.load = None
            request.load_failed = True
            self._let_go(request)
        self._loading_back.failed(operation)

    def extend(self, request: Request, total_tokens: int) -> bool:
        """Reserve device pages until the request has room for `total_tokens` tokens."""
        self._require_ready(request)
        state = self._state
        missing = -(-total_tokens // state.config.page_tokens)
        missing -= request.prefix + len(request.own)
        if missing <= 0:
            return True
        pages = state.take(DEVICE, missing)
        if pages is None:
            return False
        request.own.extend(pages)
        state.journal.record("extend", request.id, missing)
        return True

    def insert(self, request: Request, tokens: bytes, *, final: bool) -> int:
        """Publish the whole pages of `tokens`; return how many tokens the tree now shares."""
        state = self._state
        self._require_ready(request)
        pages = state.tree.whole_pages(tokens)
        if pages > request.prefix + len(request.own):
            raise UsageError(
                f"request {request.id!r} inserts {pages} pages and has"
                f" {request.prefix + len(request.own)}"
            )
        if pages < request.prefix:
            raise UsageError(
                f"request {request.id!r} inserts {pages} pages and shares {request.prefix} already"
            )
        self._require_same_prefix(request, tokens)
        state.tick()
        state.journal.record("insert", request.id, pages, int(final))
        step = state.tree.page_bytes
        tokens = tokens[: pages * step]
        nodes = state.walk_to(state.root(request.place), tokens)
        node = nodes[-1] if nodes else state.root(request.place)
        for each in nodes:
            if each.end > request.prefix:
                self._publish(request, each)
        if node.end < pages:
            node = state.tree.add(node, tokens[node.end * step :])
            self._publish(request, node)
        self._extend_lock(request, node)
        state.touch(node)
        if node.parent is not None:
            self._backing_up.write_through(node)
        return pages * state.config.page_tokens

    def page_table(self, request: Request) -> PageRun:
        """Return the device pages of a request that is ready, in token order."""
        self._require_ready(request)
        table = page_run()
        if request.lock is not None:
            for node in reversed(list(request.lock.node.path())):
                pages = node.values[DEVICE][0]
                assert pages is not None
                table.extend(pages)
        table.extend(request.own)
        return table

    def release(self, request: Request) -> None:
        """Give back everything that the request holds, and forget it."""
        self._let_go(request)
        self._state.journal.record("release", request.id)
        self._state.leave(request)

    def load_state(self, request: Request) -> LoadState:
        """Say whether the request's pages are there."""
        if request.load_failed:
            return LoadState.FAILED
        if not request.admitted:
            raise UsageError(f"request {request.id!r} is not admitted; call load_back first")
        return LoadState.READY if request.load is None else LoadState.LOADING

    def _admission(self, request: Request, device: int, best: int) -> Admission:
        unit = self._state.config.page_tokens
        start, stop = request.fetched
        fetched = max(0, min(best, stop) - max(device, start))
        return Admission(
            device_tokens=device * unit,
            host_tokens=(best - device - fetched) * unit,
            storage_tokens=fetched * unit,
            operation=request.load,
        )

    def _publish(self, request: Request, node: Node) -> None:
        """Give the request's own pages for `node` to it, or back if it has pages already."""
        mine = request.own[: node.end - request.prefix]
        request.own = request.own[node.end - request.prefix :]
        request.prefix = node.end
        if node.values[DEVICE][0] is None:
            self._state.attach(node, DEVICE, mine)
        else:
            self._state.pools[DEVICE].give_back(mine)

    def _extend_lock(self, request: Request, node: Node) -> None:
        lock = self._state.holds.acquire(DEVICE, self._state.component.index, node)
        if request.lock is not None:
            self._state.holds.release(request.lock)
        request.lock, request.prefix = lock, node.end

    def _let_go(self, request: Request) -> None:
        if request.lock is not None:
            self._state.holds.release(request.lock)
        self._state.pools[DEVICE].give_back(request.own)
        request.own = page_run()
        request.lock, request.prefix, request.admitted = None, 0, False

    def _require_same_prefix(self, request: Request, tokens: bytes) -> None:
        if request.lock is None or not request.prefix:
            return
        walk = self._state.tree.walk(self._state.root(request.place), tokens)
        if not any(node is request.lock.node for node in walk.nodes):
            raise UsageError(
                f"request {request.id!r} inserts other tokens than those that it was admitted with"
            )

    def _require_ready(self, request: Request) -> None:
        if self.load_state(request) is not LoadState.READY:
            raise UsageError(f"request {request.id!r} is not ready; its load back has not settled")
