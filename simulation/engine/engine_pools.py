"""All device pages of an engine that owns them: those of each component, by request.

A request has a page table for each pool. It gives up the pages that a sliding window has left behind. A
state lies in one slot, which the model changes in place; what is kept of it for others, or lent to a
backup for long, is a copy in another slot.
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
from .model import Layers, Model

Held = Mapping[str, Sequence[int]]
"""The pages that a request had, by pool."""


class EnginePools:
    """Knows which pages each request has, and what is cached on the device."""

    def __init__(
        self, model: Model, memories: Sequence[SymbolicMemory], page_tokens: int, random: Random
    ) -> None:
        self._page = page_tokens
        self._layers = model.layers
        self._paged = [each for each in model.layers if each.per_page]
        self.state = next((each for each in model.layers if not each.per_page), None)
        """The layers with a state, which a request cannot go on without; None if there are none."""
        self.pools = {
            each.pool: AllocatedPages([memory.device[each.pool] for memory in memories], random)
            for each in model.layers
        }
        self._spoiled: list[tuple[str, Sequence[int]]] = []
        """By pool: pages that are to be overwritten."""

    def cached(self, request: EngineRequest, pages: int, *, with_state: bool) -> int:
        """Return how many of its first `pages` pages a request can have from the cache and go on."""
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
        """Give a request the cached pages before page `first`, and own pages for the rest of `length`.

        If it `forks`, its state there is copied from the cached one. Returns False if there is no room;
        the request has no page then.
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
        """Give a request pages up to `length` tokens, or as many as are free; return how far."""
        missing = max(0, -(-length // self._page) - len(request.table))
        missing = min(missing, *(self.pools[each.pool].free for each in self._paged))
        for each in self._paged:
            pages = self.pools[each.pool].allocate(missing)
            assert pages is not None
            request.tables[each.pool] += pages
        request.room = len(request.table) * self._page
        return min(length, request.room)

    def publish(self, request: EngineRequest) -> None:
        """Cache the full pages of a request for others."""
        length = request.computed
        for each in self._paged:
            pool = self.pools[each.pool]
            for index, page in enumerate(request.tables[each.pool][: length // self._page]):
                content = each.content(request, index, length)
                if page != NO_PAGE and content != EMPTY:
                    pool.publish(page, content)

    def windows(self, length: int) -> list[int]:
        """Return for each window the first position that is read after `length` tokens."""
        return [self.reads(each, length) for each in self._paged[1:]]

    def can_compute(self, request: EngineRequest) -> bool:
        """Say whether a request whose load failed has the pages to go on, and needs no state."""
        first = request.computed // self._page
        paged = all(NO_PAGE not in request.tables[each.pool][first:] for each in self._paged)
        return paged and (self.state is None or not first)

    def leave_behind(self, request: EngineRequest) -> int:
        """Give back the pages that no window of a request reaches any more; return how many."""
        count = 0
        for each in () if request.keeps_windows else self._paged[1:]:
            table = request.tables.get(each.pool, [])
            end = min(len(table), self.reads(each, request.computed))
            left = [page for page in table[:end] if page != NO_PAGE]
            self.pools[each.pool].give_back(left)
            table[:end] = [NO_PAGE] * end
            count += len(left)
        return count

    # The state: in the slot of a request, and copies of it.

    def slot(self, request: EngineRequest) -> list[int]:
        """Return the slot in which the state of a request is computed; empty if the model has none."""
        return [] if self.state is None else request.tables[self.state.pool]

    def reserve_copy(self, request: EngineRequest) -> bool:
        """Allocate a slot for a copy of the state after the next forward pass; False if none is."""
        slot = None if self.state is None else self.pools[self.state.pool].allocate(1)
        request.copies_state = slot is not None
        request.kept += slot or ()
        return request.copies_state

    def copy_state(self, request: EngineRequest) -> None:
        """Copy the state of a request to the slot that was allocated for it, and cache the copy."""
        if self.state is not None and request.copies_state:
            pool, slot = self.pools[self.state.pool], request.kept[-1]
            pool.fork(self.slot(request)[0], slot)
            pool.publish(slot, self.state.content(request, 0, request.computed))
            request.copies_state = False

    def let_go_of_copies(self, request: EngineRequest) -> None:
        """Give back the copies of the state of a request, which no backup reads any more."""
        if self.state is not None:
            self.pools[self.state.pool].give_back(request.kept)
            request.kept = []

    # What is lent, and what is given back.

    def lend(
        self, rank: int, request: EngineRequest, first: int, last: int, slot: Sequence[int]
    ) -> PagesByPool:
        """Return this rank's numbers of the pages from `first` to `last`, and of the state's `slot`."""
        lent = {
            each.pool: self.pools[each.pool].on(rank, request.tables[each.pool][first:last])
            for each in self._paged
        }
        if self.state is not None:
            lent[self.state.pool] = self.pools[self.state.pool].on(rank, slot)
        return lent if len(lent) > 1 else lent[KV_POOL]

    def take_all(self, request: EngineRequest) -> Held:
        """Take all pages away from a request; the caller gives them back."""
        held = request.tables
        if self.state is not None:
            held[self.state.pool] = held.get(self.state.pool, []) + request.kept
        request.tables, request.kept, request.room = {}, [], 0
        request.unfilled = {}
        request.copies_state = request.lends_state = request.state_comes = False
        return held

    def give_back(self, held: Held, *, overwrite: bool = False) -> None:
        """Drop one user of each page; with `overwrite`, pages that become free are overwritten."""
        for pool, pages in held.items():
            self.pools[pool].give_back(pages)
            if overwrite:
                self._spoiled.append((pool, pages))

    def overwrite(self) -> None:
        """Overwrite what was given back for it: after all fences of the step's decisions."""
        for pool, pages in self._spoiled:
            self.pools[pool].overwrite(pages)
        self._spoiled.clear()

    def require_untouched(self, why: str, request: EngineRequest) -> None:
        """Raise if a copy may touch a page that only this request has."""
        for pool, table in request.tables.items():
            self.pools[pool].require_untouched(why, self.pools[pool].alone(table))

    def forget_cached(self) -> None:
        for pool in self.pools.values():
            pool.forget_cached()

    def check_free(self) -> None:
        for pool in self.pools.values():
            pool.check_free()

    def reads(self, layers: Layers, length: int) -> int:
        """Return the first position that the token after `length` reads."""
        return layers.needed(length, length).start

    def _has(self, layers: Layers, request: EngineRequest, end: int) -> bool:
        """Say whether the device has what these layers need to go on after page `end`."""
        pool, length = self.pools[layers.pool], end * self._page
        entries = range(self.reads(layers, length), end) if layers.per_page else range(1)
        return all(pool.has(layers.content(request, index, length)) for index in entries)
