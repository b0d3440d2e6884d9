"""KV events in vLLM's terms: which of vLLM's blocks are in host memory and in the store.

Routers identify a block by vLLM's hash over all tokens up to its end; the replica's events have page
keys. This module computes each published page's block hashes, once, from vLLM's inputs: the previous
hash, the tokens, and the adapter, salt and items. Adapter and salt are equal for all requests of a
namespace, and the items for all requests with the page's key. Only pages in host memory are remembered.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...ranks.protocol.events import Cause, Event, Removed, Reset, Stored, Tier
from ...ranks.protocol.orders import KV_POOL
from .contract import LoraRequest, MultiModalFeature, VllmRequest

NAMESPACES_MAX = 1 << 14
"""Maximum number of remembered namespaces. Pages of a forgotten namespace are not published."""

ExtraKeys = tuple[Any, ...] | None


@dataclass(slots=True)
class ItemPlace:
    """Position of a multimodal item in the prompt; see `MultiModalPosition`."""

    offset: int
    length: int
    is_embed: None = None


@dataclass(slots=True)
class HashedItem:
    """The hashed fields of a multimodal item, without its content."""

    identifier: str
    mm_position: ItemPlace
    modality: str = ""
    data: None = None

    @classmethod
    def of(cls, item: MultiModalFeature) -> "HashedItem":
        """Return the hashed fields of one of vLLM's items."""
        return cls(item.identifier, ItemPlace(item.mm_position.offset, item.mm_position.length))


@dataclass(frozen=True, slots=True, eq=False)
class HashedRequest:
    """A placeholder for a request in vLLM's hashing: its hashed fields except the tokens."""

    lora_request: LoraRequest | None
    mm_features: Sequence[MultiModalFeature]
    cache_salt: str | None
    prompt_embeds: None = None

    @property
    def plain(self) -> bool:
        """Whether only the tokens are hashed."""
        return not (self.lora_request or self.mm_features or self.cache_salt)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """A page in which items begin, so that its ids in keys differ from its tokens."""

    origin: HashedRequest
    """Includes the items that begin before the page's end."""
    tokens: tuple[int, ...]


class BlockHasher(Protocol):
    """vLLM's block hash function."""

    hash_tokens: int
    """Tokens covered by one hash."""
    block_tokens: int
    """Tokens per block, a multiple of `hash_tokens`."""

    def hash(self, before: bytes | None, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
        """Return the hash of a block that ends with `tokens`; `before` is the previous hash."""
        ...

    def extra_keys(self, origin: HashedRequest, start: int, end: int) -> ExtraKeys:
        """Return the other hashed values for the tokens from `start` to `end` of a request."""
        ...


class HashedPage(NamedTuple):
    """A page with vLLM's hashes of its blocks."""

    origin: HashedRequest
    end: int
    """Number of tokens up to the page's end."""
    before: bytes | None
    """Hash of the block before the page; None for the first page."""
    hashes: tuple[bytes, ...]
    """Hashes of the page's blocks."""
    extra: tuple[ExtraKeys, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages were stored in a tier."""

    tier: Tier
    pages: tuple[HashedPage, ...]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Blocks were removed from a tier."""

    tier: Tier
    hashes: tuple[bytes, ...]


class BlockEvents:
    """Converts a cache's events to changes of vLLM blocks, beginning with the cache's first event.

    Only the full-attention pool is published. For the storage tier, only pages that this engine wrote
    or read are published, and removals by the store are unknown.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._heard: list[Stored | Removed | Reset] = []
        self._origins: OrderedDict[str, HashedRequest] = OrderedDict()
        """Hashed request fields by namespace."""
        self._item_pages: OrderedDict[bytes, ItemPage] = OrderedDict()
        """Pages with items, by key."""
        self._seeds: dict[bytes, HashedRequest] = {}
        """Hashed request fields, by the key that precedes a namespace's first page."""
        self._pages: dict[bytes, HashedPage] = {}
        """Pages in host memory, by key."""
        self._stored: set[bytes] = set()
        """Keys in `_pages` that were also published for storage."""
        self._more: Counter[bytes] = Counter()
        """Number of additional pages per key.

        After a reset to earlier weights, new pages get the keys of pages that requests still hold.
        """

    def listen(self, events: Iterable[Event]) -> None:
        """Record events; cheap enough for the engine's thread."""
        for event in events:
            if isinstance(event, Stored | Removed):
                if event.pool == KV_POOL and event.tier is not Tier.DEVICE:
                    self._heard.append(event)
            elif isinstance(event, Reset):
                self._heard.append(event)

    def saw(
        self,
        request: VllmRequest,
        namespace: str,
        seed: Callable[[str], bytes],
        item_pages: Mapping[bytes, tuple[int, int]] | None = None,
    ) -> None:
        """Record the hashed fields of a namespace; `seed` returns the key that precedes its pages.

        `item_pages` maps the keys of the request's pages with item ids to their token ranges. None
        means that the namespace identifies the items.
        """
        items = tuple(map(HashedItem.of, request.mm_features))
        for key, (start, end) in (item_pages or {}).items():
            begun = tuple(each for each in items if each.mm_position.offset < end)
            origin = HashedRequest(request.lora_request, begun, request.cache_salt)
            self._item_pages[key] = ItemPage(origin, tuple(request.all_token_ids[start:end]))
            self._item_pages.move_to_end(key)
            if len(self._item_pages) > NAMESPACES_MAX:
                self._item_pages.popitem(last=False)
        if namespace in self._origins:
            self._origins.move_to_end(namespace)
            return
        common = items if item_pages is None else ()
        origin = HashedRequest(request.lora_request, common, request.cache_salt)
        self._origins[namespace] = self._seeds[seed(namespace)] = origin
        if len(self._origins) > NAMESPACES_MAX:
            dropped, _ = self._origins.popitem(last=False)
            self._seeds.pop(seed(dropped), None)

    def take(self, seed: Callable[[str], bytes]) -> Iterator[PagesStored | PagesRemoved]:
        """Yield the changes since the last call."""
        heard, self._heard = self._heard, []
        for event in heard:
            if isinstance(event, Reset):
                yield from self._reset(seed)
            elif isinstance(event, Removed):
                yield from self._removed(event)
            elif event.tier is Tier.HOST:
                yield from self._came_to_host(event)
            else:
                yield from self._came_to_storage(event.keys)

    def _came_to_host(self, event: Stored) -> Iterator[PagesStored]:
        before = self._pages.get(event.after)
        origin = before.origin if before is not None else self._seeds.get(event.after)
        if origin is None:
            # Pages from before a reset, which no new request matches, or pages of a forgotten
            # namespace.
            return
        ids: list[int] = np.frombuffer(event.tokens, dtype="<i4").tolist()
        page_tokens = len(ids) // len(event.keys)
        run: list[HashedPage] = []
        for at, key in enumerate(event.keys):
            page = self._pages.get(key)
            if page is None:
                tokens: Sequence[int] = ids[at * page_tokens : (at + 1) * page_tokens]
                if (begun := self._item_pages.get(key)) is not None:
                    origin, tokens = begun.origin, begun.tokens
                elif min(tokens) < 0:
                    # The request with these items was forgotten, so vLLM's item names are unknown.
                    break
                page = self._pages[key] = self._page(origin, before, tokens)
                run.append(page)
            else:
                self._more[key] += 1
                yield from _run(Tier.HOST, run)
                run = []
            before, origin = page, page.origin
        yield from _run(Tier.HOST, run)
        if event.cause is Cause.FETCHED:
            yield from self._came_to_storage(event.keys)

    def _came_to_storage(self, keys: Sequence[bytes]) -> Iterator[PagesStored]:
        new = [key for key in keys if key in self._pages and key not in self._stored]
        self._stored.update(new)
        run: list[HashedPage] = []
        for page in map(self._pages.__getitem__, new):
            if run and page.before != run[-1].hashes[-1]:
                yield from _run(Tier.STORAGE, run)
                run = []
            run.append(page)
        yield from _run(Tier.STORAGE, run)

    def _removed(self, event: Removed) -> Iterator[PagesRemoved]:
        gone: list[bytes] = []
        for key in event.keys:
            if key in self._more:
                self._more[key] -= 1
                if not self._more[key]:
                    del self._more[key]
            elif (page := self._pages.pop(key, None)) is not None:
                self._stored.discard(key)
                gone += page.hashes
        if gone:
            yield PagesRemoved(event.tier, tuple(gone))

    def _reset(self, seed: Callable[[str], bytes]) -> Iterator[PagesRemoved]:
        """Yield the removal of all published blocks, and switch to the keys after the reset."""
        for tier, keys in ((Tier.HOST, [*self._pages]), (Tier.STORAGE, [*self._stored])):
            if gone := tuple(each for key in keys for each in self._pages[key].hashes):
                yield PagesRemoved(tier, gone)
        self._pages.clear()
        self._stored.clear()
        self._more.clear()
        self._seeds = {seed(name): origin for name, origin in self._origins.items()}

    def _page(
        self, origin: HashedRequest, before: HashedPage | None, tokens: Sequence[int]
    ) -> HashedPage:
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
        return HashedPage(
            origin, start + len(tokens), first, tuple(hashes), tuple(extra), tuple(tokens)
        )

    def _extra_keys(self, origin: HashedRequest, start: int, end: int) -> ExtraKeys:
        return None if origin.plain else self._hasher.extra_keys(origin, start, end)


def _run(tier: Tier, pages: list[HashedPage]) -> Iterator[PagesStored]:
    if pages:
        yield PagesStored(tier, tuple(pages))
