"""All device pages of a simulated engine that owns them, by component and request.

A request has one page table per pool, and frees pages that a sliding window has passed. A recurrent
state is one slot that the model updates in place. A state that is cached for other requests, or that a
long backup reads, is a copy in another slot.
"""

from collections.abc import Mapping, Sequence
from random import Random

from ...ranks.group.host_cache import PagesByPool
from ...ranks.protocol.orders import KV_POOL
from ..rank.memory import SymbolicMemory
from ..world.contents import EMPTY
from ..world.request import EngineRequest
from .device_pages import AllocatedPages
from .every_rank import NO_PAGE
from .model import Layers, SimulatedModel

Held = Mapping[str, Sequence[int]]
"""Device pages taken from a request, by pool."""


class EnginePools:
    """Tracks the device pages of each request, and the engine's prefix cache on the device."""

    def __init__(
        self,
        model: SimulatedModel,
        memories: Sequence[SymbolicMemory],
        page_tokens: int,
        random: Random,
    ) -> None:
        self._page = page_tokens
        self._layers = model.layers
        self._paged = [each for each in model.layers if each.per_page]
        self.state = next((each for each in model.layers if not each.per_page), None)
        """The model's component with a recurrent state; None if the model has none."""
        self.pools = {
            each.pool: AllocatedPages([memory.device[each.pool] for memory in memories], random)
            for each in model.layers
        }
        self._spoiled: list[tuple[str, Sequence[int]]] = []
        """Freed pages to be overwritten, each entry with a pool and its pages."""

    def cached(self, request: EngineRequest, pages: int, *, with_state: bool) -> int:
        """Return how many of a request's first `pages` pages it can take from the device prefix cache.

        The request must be able to continue after these pages. The cache must therefore also have the
        window pages for the next token and, if `with_state`, the recurrent state.
        """
        full, end = self.pools[KV_POOL], 0
        while end < pages:
            length = (end + 1) * self._page
            if not full.has(self._layers[0].content(request, end, length)):
                break
            end += 1
        others = self._layers[1:] if with_state else self._paged[1:]
        while end and not all(self._has(each, request, end) for each in others):
            end -= 1
        return end

    def begin(
        self, request: EngineRequest, first: int, length: int, *, forks: bool = False
    ) -> bool:
        """Give a request cached pages before position `first`, and new pages up to `length` tokens.

        With `forks`, the request gets a copy of the cached state. Return False if too few pages are
        free; the request then gets no pages.
        """
        start, last = first * self._page, -(-length // self._page)
        tables: dict[str, list[int]] = {}
        unfilled: dict[str, range] = {}
        for each in self._layers:
            pool, table, own = self.pools[each.pool], list[int](), 1
            if each.per_page:
                reads = self.reads(each, start)
                shared = (each.content(request, index, start) for index in range(reads, first))
                table = [NO_PAGE] * reads + pool.share(shared)
                behind = max(0, self.reads(each, length) - first)
                own = last - first
                if request.keeps_windows:
                    unfilled[each.pool] = range(first, first + behind)
                else:
                    table += [NO_PAGE] * behind
                    own -= behind
            tables[each.pool] = table
            state = forks and not each.per_page
            source = pool.share([each.content(request, 0, start)] if state else ())
            pages = pool.allocate(own)
            if pages and source:
                pool.fork(source[0], pages[0])
            pool.give_back(source)
            if pages is None:
                self.give_back(tables)
                return False
            table += pages
        request.tables, request.unfilled = tables, unfilled
        request.room = last * self._page
        return True

    def extend(self, request: EngineRequest, length: int) -> int:
        """Allocate pages up to `length` tokens, or as many as are free.

        Return the number of tokens that fit, at most `length`.
        """
        missing = max(0, -(-length // self._page) - len(request.table))
        missing = min(missing, *(self.pools[each.pool].free for each in self._paged))
        for each in self._paged:
            pages = self.pools[each.pool].allocate(missing)
            assert pages is not None
            request.tables[each.pool] += pages
        request.room = len(request.table) * self._page
        return min(length, request.room)

    def publish(self, request: EngineRequest) -> None:
        """Add a request's full pages to the engine's prefix cache on the device."""
        length = request.computed
        for each in self._paged:
            pool = self.pools[each.pool]
            for index, page in enumerate(request.tables[each.pool][: length // self._page]):
                content = each.content(request, index, length)
                if page != NO_PAGE and content != EMPTY:
                    pool.publish(page, content)

    def windows(self, length: int) -> list[int]:
        """Return for each window pool the first page position needed after `length` tokens."""
        return [self.reads(each, length) for each in self._paged[1:]]

    def can_compute(self, request: EngineRequest) -> bool:
        """Return whether a request has all pages and states to compute after a failed load."""
        first = request.computed // self._page
        paged = all(NO_PAGE not in request.tables[each.pool][first:] for each in self._paged)
        return paged and (self.state is None or not first)

    def leave_behind(self, request: EngineRequest) -> int:
        """Free the pages that a request's windows have passed; return how many."""
        count = 0
        for each in () if request.keeps_windows else self._paged[1:]:
            table = request.tables.get(each.pool, [])
            end = min(len(table), self.reads(each, request.computed))
            left = [page for page in table[:end] if page != NO_PAGE]
            self.pools[each.pool].give_back(left)
            table[:end] = [NO_PAGE] * end
            count += len(left)
        return count

    def slot(self, request: EngineRequest) -> list[int]:
        """Return the slot of a request's state as a list; empty if the model has no states."""
        return [] if self.state is None else request.tables[self.state.pool]

    def reserve_copy(self, request: EngineRequest) -> bool:
        """Allocate a slot for a copy of a request's state; return False if no slot is free.

        The copy is made after the next forward pass.
        """
        slot = None if self.state is None else self.pools[self.state.pool].allocate(1)
        request.copies_state = slot is not None
        request.kept += slot or ()
        return request.copies_state

    def copy_state(self, request: EngineRequest) -> None:
        """Copy a request's state to the slot reserved for the copy, and cache the copy."""
        if self.state is not None and request.copies_state:
            pool, slot = self.pools[self.state.pool], request.kept[-1]
            pool.fork(self.slot(request)[0], slot)
            pool.publish(slot, self.state.content(request, 0, request.computed))
            request.copies_state = False

    def let_go_of_copies(self, request: EngineRequest) -> None:
        """Free all copies of a request's state, because no backup reads them any more."""
        if self.state is not None:
            self.pools[self.state.pool].give_back(request.kept)
            request.kept = []

    def lend(
        self, rank: int, request: EngineRequest, first: int, last: int, slot: Sequence[int]
    ) -> PagesByPool:
        """Return, by pool, this rank's numbers of the pages that a copy for a request accesses.

        These are the request's pages from position `first` up to `last` (exclusive), and the state slot
        in `slot`.
        """
        lent = {
            each.pool: self.pools[each.pool].on(rank, request.tables[each.pool][first:last])
            for each in self._paged
        }
        if self.state is not None:
            lent[self.state.pool] = self.pools[self.state.pool].on(rank, slot)
        return lent if len(lent) > 1 else lent[KV_POOL]

    def take_all(self, request: EngineRequest) -> Held:
        """Take all pages away from a request and return them; the caller must free them."""
        held = request.tables
        if self.state is not None:
            held[self.state.pool] = held.get(self.state.pool, []) + request.kept
        request.tables, request.kept, request.room = {}, [], 0
        request.unfilled = {}
        request.copies_state = request.lends_state = request.state_comes = False
        return held

    def give_back(self, held: Held, *, overwrite: bool = False) -> None:
        """Drop one user of each page; if `overwrite`, pages that become free are overwritten later."""
        for pool, pages in held.items():
            self.pools[pool].give_back(pages)
            if overwrite:
                self._spoiled.append((pool, pages))

    def overwrite(self) -> None:
        """Overwrite the freed pages that `give_back` collected; call it after a step's fences."""
        for pool, pages in self._spoiled:
            self.pools[pool].overwrite(pages)
        self._spoiled.clear()

    def require_untouched(self, why: str, request: EngineRequest) -> None:
        """Raise if a copy may still access a page that only this request uses."""
        for pool, table in request.tables.items():
            self.pools[pool].require_untouched(why, self.pools[pool].alone(table))

    def forget_cached(self) -> None:
        for pool in self.pools.values():
            pool.forget_cached()

    def check_free(self) -> None:
        for pool in self.pools.values():
            pool.check_free()

    def reads(self, layers: Layers, length: int) -> int:
        """Return the first page position that `layers` read for the token after `length` tokens."""
        return layers.needed(length, length).start

    def _has(self, layers: Layers, request: EngineRequest, end: int) -> bool:
        """Return whether the device prefix cache has all that `layers` need after `end` pages."""
        pool, length = self.pools[layers.pool], end * self._page
        entries = range(self.reads(layers, length), end) if layers.per_page else range(1)
        return all(pool.has(layers.content(request, index, length)) for index in entries)
