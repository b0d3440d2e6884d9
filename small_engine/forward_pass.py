"""A simulated model: writes and verifies the bytes of every pool's pages through the page tables.

The bytes are a function of the tokens alone (`contents`), so that pages restored by the cache can be
compared with the bytes that they should have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..ranks.protocol.agreed_pools import shard_layouts
from ..ranks.protocol.config import Recurrent, SlidingWindow
from ..ranks.protocol.orders import KV_POOL
from .contents import KeyedTokens, PageContents
from .counts import ComparedPages

if TYPE_CHECKING:
    from ..ranks.group.cache import Cache

Pages = npt.NDArray[np.int32]

NO_PAGE = -1
"""Page number in a window's page table for a page that was already freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """The tokens of a request from position `start` up to `stop`."""

    request: str
    tokens: KeyedTokens
    start: int
    stop: int


class ForwardPass:
    """Computes and verifies the pages of one rank's cache."""

    def __init__(self, cache: "Cache") -> None:
        config = cache.config
        self._cache = cache
        self._page_tokens = config.layout.page_tokens
        self._contents = {
            pool: PageContents(shard, pool)
            for pool, shard in shard_layouts(config, cache.rank, cache.world_size).items()
        }
        self._windows = {
            each.pool: each.window_tokens
            for each in config.components
            if isinstance(each, SlidingWindow)
        }
        self._states = [each.pool for each in config.components if isinstance(each, Recurrent)]

    def compute(self, spans: Sequence[TokenSpan]) -> None:
        """Compute tokens of several requests, each of which has pages for its tokens.

        A page is filled when its last token is computed. States are updated in place.
        """
        if not spans:
            return
        for pool in (KV_POOL, *self._windows):
            completed = [self._completed(pool, span) for span in spans]
            pages = np.concatenate([pages for pages, _ in completed])
            self._fill(pool, pages, [key for _, keys in completed for key in keys])
        for pool in self._states:
            slots = [self._cache.page_table(span.request, pool) for span in spans]
            self._fill(
                pool, np.concatenate(slots), [each.tokens.state_key(each.stop) for each in spans]
            )

    def begin_page(self, request: str, tokens: KeyedTokens, computed: int) -> None:
        """Fill a request's partial last page before a retraction; `compute` fills no partial page."""
        for pool, pages, keys in self._begun(request, tokens, computed):
            self._fill(pool, pages, keys)

    def verify(
        self, request: str, tokens: KeyedTokens, computed: int, *, moved: bool = False
    ) -> dict[str, ComparedPages]:
        """Verify the pages that a model reads to compute token number `computed`; return page counts.

        The counts are by pool. The pages are all earlier whole pages of full attention, the pages of
        each window, and the state. For a resumed request (`moved`) the partial last page is included.
        """
        counts: dict[str, ComparedPages] = {}
        begun = self._begun(request, tokens, computed) if moved else ()
        for pool, pages, keys in (*self._needed(request, tokens, computed), *begun):
            before = counts.get(pool, ComparedPages(0, 0))
            found = self._verify(pool, pages, keys)
            counts[pool] = ComparedPages(before.pages + found.pages, before.corrupt + found.corrupt)
        return counts

    def _completed(self, pool: str, span: TokenSpan) -> tuple[Pages, list[bytes]]:
        """Return (pages, keys) of the pages whose last token is within the span."""
        first, last = span.start // self._page_tokens, span.stop // self._page_tokens
        if first == last:
            return np.empty(0, dtype=np.int32), []
        pages = self._cache.page_table(span.request, pool)[first:last]
        if len(pages) < last - first or (pages == NO_PAGE).any():
            raise InternalError(
                f"{span.request} computes pages {first} to {last - 1}, and pool {pool!r} lacks some"
                f" of them: {pages.tolist()}"
            )
        return pages, span.tokens.page_keys[first:last]

    def _needed(
        self, request: str, tokens: KeyedTokens, computed: int
    ) -> Iterator[tuple[str, Pages, list[bytes]]]:
        whole = computed // self._page_tokens
        for pool in (KV_POOL, *self._windows):
            first = 0
            if pool in self._windows:
                # The window includes the token to compute, so only `window` - 1 earlier tokens are
                # read.
                first = max(0, computed - self._windows[pool] + 1) // self._page_tokens
            if first < whole:
                pages = self._cache.page_table(request, pool)[first:whole]
                yield pool, pages, tokens.page_keys[first:whole]
        if computed:
            for pool in self._states:
                yield pool, self._cache.page_table(request, pool), [tokens.state_key(computed)]

    def _begun(
        self, request: str, tokens: KeyedTokens, computed: int
    ) -> Iterator[tuple[str, Pages, list[bytes]]]:
        whole, rest = divmod(computed, self._page_tokens)
        for pool in (KV_POOL, *self._windows) if rest else ():
            page = self._cache.page_table(request, pool)[whole : whole + 1]
            yield pool, page, [tokens.state_key(computed)]

    def _fill(self, pool: str, pages: Pages, keys: list[bytes]) -> None:
        if keys:
            self._contents[pool].fill(self._cache.device_pools[pool], pages, keys)

    def _verify(self, pool: str, pages: Pages, keys: list[bytes]) -> ComparedPages:
        there = np.flatnonzero(pages != NO_PAGE)
        held, wanted = pages[there], [keys[at] for at in there]
        wrong = self._contents[pool].verify(self._cache.device_pools[pool], held, wanted)
        return ComparedPages(len(keys), len(keys) - len(held) + wrong)
