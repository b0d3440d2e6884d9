"""KV events in vLLM's words: which of its blocks are in host memory and in the store.

vLLM names a block by a hash of its own over everything before it, and a router knows blocks by nothing
else. The replica's notices name pages by their keys. So each page's hash is computed here from what
vLLM would have hashed: the hash of the page before, the page's tokens, and what else tells requests
apart. Adapter and salt are the same for all requests of a namespace; images are those that begin up to
a page's end, the same for all that have its key. Only pages that are told of are hashed, once each, and
only as many are remembered as host memory has.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...ranks.protocol.notices import Cause, Notice, Removed, Reset, Stored, Tier
from ...ranks.protocol.orders import KV_POOL
from .contract import LoraRequest, MultiModalFeature, VllmRequest

NAMESPACES_MAX = 1 << 14
"""How many namespaces are remembered; what is stored of one that was forgotten is not told."""

ExtraKeys = tuple[Any, ...] | None


@dataclass(slots=True)
class Place:
    """The place of an item; see `MultiModalPosition`."""

    offset: int
    length: int
    is_embed: None = None


@dataclass(slots=True)
class Item:
    """What is hashed of an item of another modality, and nothing of its content."""

    identifier: str
    mm_position: Place
    modality: str = ""
    data: None = None

    @classmethod
    def of(cls, item: MultiModalFeature) -> "Item":
        """Return what is hashed of an item of vLLM's."""
        return cls(item.identifier, Place(item.mm_position.offset, item.mm_position.length))


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Holds what vLLM hashes of a request beside its tokens; it stands in for the request."""

    lora_request: LoraRequest | None
    mm_features: Sequence[MultiModalFeature]
    cache_salt: str | None
    prompt_embeds: None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but the tokens is hashed."""
        return not (self.lora_request or self.mm_features or self.cache_salt)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """A page in which items begin, and whose ids in keys are others than its tokens."""

    origin: Origin
    """It has the items that begin up to the page's end."""
    tokens: tuple[int, ...]
    """Those of the page."""


class BlockHasher(Protocol):
    """vLLM's own hashing."""

    hash_tokens: int
    """How many tokens one hash takes in."""
    block_tokens: int
    """How many tokens a block has, a multiple of `hash_tokens`."""

    def hash(self, before: bytes | None, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
        """Return the hash of what ends with `tokens`; `before` is that of what is before them."""
        ...

    def extra_keys(self, origin: Origin, start: int, end: int) -> ExtraKeys:
        """Return what else counts for the tokens from `start` to `end` of a request."""
        ...


class Page(NamedTuple):
    """A page as vLLM knows it."""

    origin: Origin
    end: int
    """How many tokens there are up to its end."""
    before: bytes | None
    """The hash of the block before it; None at the beginning."""
    hashes: tuple[bytes, ...]
    """Those of its blocks."""
    extra: tuple[ExtraKeys, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages that follow each other came to a tier."""

    tier: Tier
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Blocks left a tier."""

    tier: Tier
    hashes: tuple[bytes, ...]


class BlockEvents:
    """Folds the notices of a cache that names pages, from its first one on.

    Told is full attention. Storage is told of as far as this engine knows: what it has written, and
    what it has found there. What leaves the store, nobody tells an engine.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._heard: list[Stored | Removed | Reset] = []
        self._origins: OrderedDict[str, Origin] = OrderedDict()
        """By namespace."""
        self._item_pages: OrderedDict[bytes, ItemPage] = OrderedDict()
        """By key."""
        self._seeds: dict[bytes, Origin] = {}
        """By the key before a namespace's first page."""
        self._pages: dict[bytes, Page] = {}
        """What host memory has, by key."""
        self._stored: set[bytes] = set()
        """Which of these were told to be in storage as well."""
        self._more: Counter[bytes] = Counter()
        """How many pages of a key there are beyond the first: a reset to earlier weights gives new
        pages the keys of those that requests still hold."""

    def listen(self, notices: Iterable[Notice]) -> None:
        """Hear what has happened; cheap, for the engine's thread."""
        for notice in notices:
            if isinstance(notice, Stored | Removed):
                if notice.pool == KV_POOL and notice.tier is not Tier.DEVICE:
                    self._heard.append(notice)
            elif isinstance(notice, Reset):
                self._heard.append(notice)

    def saw(
        self,
        request: VllmRequest,
        namespace: str,
        seed: Callable[[str], bytes],
        item_pages: Mapping[bytes, tuple[int, int]] | None = None,
    ) -> None:
        """Note what requests of a namespace have in common; `seed` gives the key before its pages.

        `item_pages` are the request's pages whose ids in keys stand for items, by key, with their first
        tokens and those behind them; None if its namespace has the items.
        """
        items = tuple(map(Item.of, request.mm_features))
        for key, (start, end) in (item_pages or {}).items():
            begun = tuple(each for each in items if each.mm_position.offset < end)
            origin = Origin(request.lora_request, begun, request.cache_salt)
            self._item_pages[key] = ItemPage(origin, tuple(request.all_token_ids[start:end]))
            self._item_pages.move_to_end(key)
            if len(self._item_pages) > NAMESPACES_MAX:
                self._item_pages.popitem(last=False)
        if namespace in self._origins:
            self._origins.move_to_end(namespace)
            return
        common = items if item_pages is None else ()
        origin = Origin(request.lora_request, common, request.cache_salt)
        self._origins[namespace] = self._seeds[seed(namespace)] = origin
        if len(self._origins) > NAMESPACES_MAX:
            dropped, _ = self._origins.popitem(last=False)
            self._seeds.pop(seed(dropped), None)

    def take(self, seed: Callable[[str], bytes]) -> Iterator[PagesStored | PagesRemoved]:
        """Yield what has changed since it was last asked."""
        heard, self._heard = self._heard, []
        for notice in heard:
            if isinstance(notice, Reset):
                yield from self._reset(seed)
            elif isinstance(notice, Removed):
                yield from self._removed(notice)
            elif notice.tier is Tier.HOST:
                yield from self._came_to_host(notice)
            else:
                yield from self._came_to_storage(notice.keys)

    def _came_to_host(self, notice: Stored) -> Iterator[PagesStored]:
        before = self._pages.get(notice.after)
        origin = before.origin if before is not None else self._seeds.get(notice.after)
        if origin is None:
            # Of before a reset, so no new request finds it; or of a namespace that was forgotten.
            return
        ids: list[int] = np.frombuffer(notice.tokens, dtype="<i4").tolist()
        page_tokens = len(ids) // len(notice.keys)
        run: list[Page] = []
        for at, key in enumerate(notice.keys):
            page = self._pages.get(key)
            if page is None:
                tokens: Sequence[int] = ids[at * page_tokens : (at + 1) * page_tokens]
                if (begun := self._item_pages.get(key)) is not None:
                    origin, tokens = begun.origin, begun.tokens
                elif min(tokens) < 0:
                    # The request of these items was forgotten, and with it what the engine calls them.
                    break
                page = self._pages[key] = self._page(origin, before, tokens)
                run.append(page)
            else:
                self._more[key] += 1
                yield from _run(Tier.HOST, run)
                run = []
            before, origin = page, page.origin
        yield from _run(Tier.HOST, run)
        if notice.cause is Cause.FETCHED:
            yield from self._came_to_storage(notice.keys)

    def _came_to_storage(self, keys: Sequence[bytes]) -> Iterator[PagesStored]:
        new = [key for key in keys if key in self._pages and key not in self._stored]
        self._stored.update(new)
        run: list[Page] = []
        for page in map(self._pages.__getitem__, new):
            if run and page.before != run[-1].hashes[-1]:
                yield from _run(Tier.STORAGE, run)
                run = []
            run.append(page)
        yield from _run(Tier.STORAGE, run)

    def _removed(self, notice: Removed) -> Iterator[PagesRemoved]:
        gone: list[bytes] = []
        for key in notice.keys:
            if key in self._more:
                self._more[key] -= 1
                if not self._more[key]:
                    del self._more[key]
            elif (page := self._pages.pop(key, None)) is not None:
                self._stored.discard(key)
                gone += page.hashes
        if gone:
            yield PagesRemoved(notice.tier, tuple(gone))

    def _reset(self, seed: Callable[[str], bytes]) -> Iterator[PagesRemoved]:
        """Take back all that was told, of storage what is known of it, and begin with other keys."""
        for tier, keys in ((Tier.HOST, [*self._pages]), (Tier.STORAGE, [*self._stored])):
            if gone := tuple(each for key in keys for each in self._pages[key].hashes):
                yield PagesRemoved(tier, gone)
        self._pages.clear()
        self._stored.clear()
        self._more.clear()
        self._seeds = {seed(name): origin for name, origin in self._origins.items()}

    def _page(self, origin: Origin, before: Page | None, tokens: Sequence[int]) -> Page:
        hasher, start = self._hasher, 0 if before is None else before.end
        last = first = None if before is None else before.hashes[-1]
        hashes: list[bytes] = []
        extra: list[ExtraKeys] = []
        for at in range(0, len(tokens), hasher.hash_tokens):
            end = at + hasher.hash_tokens
            last = hasher.hash(
                last, tokens[at:end], self._extra_keys(origin, start + at, start + end)
            )
            if not end % hasher.block_tokens:
                hashes.append(last)
                block = start + end - hasher.block_tokens
                extra.append(self._extra_keys(origin, block, start + end))
        return Page(origin, start + len(tokens), first, tuple(hashes), tuple(extra), tuple(tokens))

    def _extra_keys(self, origin: Origin, start: int, end: int) -> ExtraKeys:
        return None if origin.plain else self._hasher.extra_keys(origin, start, end)


def _run(tier: Tier, pages: list[Page]) -> Iterator[PagesStored]:
    if pages:
        yield PagesStored(tier, tuple(pages))
