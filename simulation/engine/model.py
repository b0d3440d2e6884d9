"""The simulated model's reads and writes of device memory for a request, by component.

A request has one page table per pool. A page's content is determined by the tokens before its end. A
sliding-window page is needed only while the window reaches it. A recurrent state is one slot that the
model updates in place.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from ...ranks.protocol.config import RankCacheConfig, SlidingWindow
from ...ranks.protocol.orders import KV_POOL
from ..world.contents import EMPTY, ExpectedContents
from ..world.request import EngineRequest
from ..world.violated import Violated
from .every_rank import NO_PAGE, EveryRank


class Layers(ABC):
    """The layers of one component, with the pool that holds their KV or state."""

    per_page = True
    """Whether a request's page table has one entry per page of tokens; otherwise it has a single entry.
    """

    def __init__(self, pool: str, page_tokens: int, contents: ExpectedContents) -> None:
        self.pool = pool
        self._page = page_tokens
        self._contents = contents

    @abstractmethod
    def content(self, request: EngineRequest, index: int, length: int) -> int:
        """Return the content of page-table entry `index` after `length` tokens; EMPTY if unknown."""

    @abstractmethod
    def needed(self, length: int, room: int) -> range:
        """Return the page-table entries that a request must have after `length` computed tokens.

        These are the entries that its next token reads, and the entries for tokens up to `room`, the
        number of tokens for which the request has pages.
        """

    @abstractmethod
    def written(self, before: int, after: int) -> range:
        """Return the page-table entries that change when tokens `before` to `after` are computed."""

    def _of(self, request: EngineRequest, length: int) -> int:
        prefix = request.head(length)
        return self._contents.of(request.namespace, prefix, request.generation, pool=self.pool)


class FullAttentionLayers(Layers):
    """Full-attention layers, which read every earlier token, so that every page is needed."""

    def content(self, request: EngineRequest, index: int, length: int) -> int:
        end = min(length, (index + 1) * self._page)
        return EMPTY if end <= index * self._page else self._of(request, end)

    def needed(self, length: int, room: int) -> range:
        del length
        return range(-(-room // self._page))

    def written(self, before: int, after: int) -> range:
        return range(before // self._page, -(-after // self._page))


class SlidingWindowLayers(FullAttentionLayers):
    """Sliding-window layers, which read only the last tokens, so that earlier pages may be missing."""

    def __init__(
        self, pool: str, page_tokens: int, contents: ExpectedContents, window_tokens: int
    ) -> None:
        super().__init__(pool, page_tokens, contents)
        self._window = window_tokens

    def content(self, request: EngineRequest, index: int, length: int) -> int:
        unfilled = index in request.unfilled.get(self.pool, ())
        return EMPTY if unfilled else super().content(request, index, length)

    def needed(self, length: int, room: int) -> range:
        return range(max(0, length - self._window) // self._page, -(-room // self._page))


class RecurrentLayers(Layers):
    """Recurrent layers, which read a single state that represents all earlier tokens."""

    per_page = False

    def content(self, request: EngineRequest, index: int, length: int) -> int:
        del index
        return self._of(request, length) if length and not request.state_comes else EMPTY

    def needed(self, length: int, room: int) -> range:
        del length, room
        return range(1)

    def written(self, before: int, after: int) -> range:
        return range(int(after > before))


class SimulatedModel:
    """All layers of the simulated model, computing in every rank's device memory."""

    def __init__(self, config: RankCacheConfig, contents: ExpectedContents) -> None:
        self._page = page_tokens = config.layout.page_tokens
        self.layers: list[Layers] = [FullAttentionLayers(KV_POOL, page_tokens, contents)]
        for component in config.components:
            pool = component.pool
            self.layers.append(
                SlidingWindowLayers(pool, page_tokens, contents, component.window_tokens)
                if isinstance(component, SlidingWindow)
                else RecurrentLayers(pool, page_tokens, contents)
            )
        self._device: Mapping[str, EveryRank] = {}

    def begin_epoch(self, device: Mapping[str, EveryRank]) -> None:
        """Continue with the device memory of a new group, given by pool."""
        self._device = device

    def check_tables(self, request: EngineRequest) -> None:
        """Raise unless a request has all pages that it needs, with the right content on all ranks."""
        for layers in self.layers:
            table = request.tables[layers.pool]
            pages = [page for page in table if page != NO_PAGE]
            there = {index for index, page in enumerate(table) if page != NO_PAGE}
            needed = layers.needed(request.computed, request.room)
            if len(set(pages)) != len(pages) or not there.issuperset(needed):
                raise Violated(
                    f"request {request.name} has computed {request.computed} tokens and has room for"
                    f" {request.room}, but its page table of pool {layers.pool!r} is {table}"
                )
            wanted = [
                (table[index], content, request.name)
                for index in sorted(there)
                if (content := layers.content(request, index, request.computed)) != EMPTY
            ]
            self._device[layers.pool].require_holding(wanted)

    def compute(self, request: EngineRequest, length: int) -> None:
        """Compute a request's tokens up to `length`: change the contents of its pages on every rank."""
        for layers in self.layers:
            table = request.tables[layers.pool]
            for index in layers.written(request.computed, length):
                before = layers.content(request, index, request.computed)
                after = layers.content(request, index, length)
                self._device[layers.pool].compute(table[index], before, after, request.name)
        request.computed = max(request.computed, length)

    def check_expected(self, requests: Sequence[EngineRequest]) -> None:
        """Raise unless the pages in the requests' tables hold the right content on every rank."""
        for layers in self.layers:
            self._device[layers.pool].require_holding(_expected(layers, requests))


def _expected(layers: Layers, requests: Iterable[EngineRequest]) -> list[tuple[int, int, str]]:
    """Return (page, content, request name) for each page in the requests' page tables.

    Pages with unknown content are left out.
    """
    contents: dict[int, int] = {}
    wanted: list[tuple[int, int, str]] = []
    for request in requests:
        for index, page in enumerate(request.tables.get(layers.pool, ())):
            if page == NO_PAGE:
                continue
            content = layers.content(request, index, request.computed)
            if content == EMPTY:
                content = -1 - len(contents)
            other = contents.setdefault(page, content)
            if other != content:
                owners = f"request {request.name} and to another request with another prefix"
                raise Violated(f"device {layers.pool} page {page} belongs to {owners}")
            if content > EMPTY:
                wanted.append((page, content, request.name))
    return wanted
