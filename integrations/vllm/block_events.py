"""Converts a replica's events to vLLM's KV events: which vLLM blocks are in host memory and storage.

Routers identify a block by vLLM's hash over all tokens up to the block's end, but the replica's events
have page keys. This module computes the block hashes of each published page once, from the inputs of
vLLM's hash: the previous hash, the tokens, and the adapter, salt and multimodal items. All requests of
a namespace have the same adapter and salt. All requests with the same page key have the same items. The
module remembers only pages that are in host memory.
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
    """Position of a multimodal item in the prompt; has the fields of `MultiModalPosition`."""

    offset: int
    length: int
    is_embed: None = None


@dataclass(slots=True)
class HashedItem:
    """The fields of a multimodal item that vLLM includes in block hashes."""

    identifier: str
    mm_position: ItemPlace
    modality: str = ""
    data: None = None

    @classmethod
    def of(cls, item: MultiModalFeature) -> "HashedItem":
        """Copy from vLLM's `item` the fields that vLLM includes in block hashes."""
        return cls(item.identifier, ItemPlace(item.mm_position.offset, item.mm_position.length))


@dataclass(frozen=True, slots=True, eq=False)
class HashedRequest:
    """The fields of a request, except tokens, that vLLM hashes; stands in for vLLM's request."""

    lora_request: LoraRequest | None
    mm_features: Sequence[MultiModalFeature]
    cache_salt: str | None
    prompt_embeds: None = None

    @property
    def plain(self) -> bool:
        """Whether the request has no adapter, item or salt, so that vLLM hashes only its tokens."""
        return not (self.lora_request or self.mm_features or self.cache_salt)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """A page in which multimodal items begin; the ids in its key differ from its tokens."""

    origin: HashedRequest
    """The hashed fields of the page's request, with the multimodal items that begin before the page's
    end."""
    tokens: tuple[int, ...]


class BlockHasher(Protocol):
    """vLLM's block hash function, with the numbers of tokens that a hash and a block cover."""

    hash_tokens: int
    """Number of tokens covered by one hash."""
    block_tokens: int
    """Number of tokens per block, a multiple of `hash_tokens`."""

    def hash(self, before: bytes | None, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
        """Return the hash of the block with these `tokens`; `before` is the previous block's hash."""
        ...

    def extra_keys(self, origin: HashedRequest, start: int, end: int) -> ExtraKeys:
        """Return what vLLM hashes for a request's tokens `start` to `end` in addition to the tokens."""
        ...


class HashedPage(NamedTuple):
    """A published page: the hashes of its blocks, and the inputs from which vLLM computes them."""

    origin: HashedRequest
    end: int
    """Number of tokens from the start of the prompt to the end of the page."""
    before: bytes | None
    """Hash of the last block before the page; None for a prefix's first page."""
    hashes: tuple[bytes, ...]
    """Hashes of the page's blocks, in token order."""
    extra: tuple[ExtraKeys, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesStored:
    """An event for one tier: these consecutive pages were stored."""

    tier: Tier
    pages: tuple[HashedPage, ...]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """An event for one tier: the blocks with these hashes were removed."""

    tier: Tier
    hashes: tuple[bytes, ...]


class BlockEvents:
    """Converts a cache's events to changes of vLLM blocks, beginning with the cache's first event.

    Only the full-attention pool is published. In the storage tier, only pages that this engine wrote or
    read are published. Removals by the store itself are not published, because no event reports them.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._queued: list[Stored | Removed | Reset] = []
        self._origins: OrderedDict[str, HashedRequest] = OrderedDict()
        """Maps a namespace to the hashed fields of its requests, in order of use; the least recently
        used one is first."""
        self._item_pages: OrderedDict[bytes, ItemPage] = OrderedDict()
        """Maps a page key to its page, for pages in which multimodal items begin."""
        self._seeds: dict[bytes, HashedRequest] = {}
        """Maps a seed to the hashed fields of a namespace's requests. The hash chain of the namespace's
        page keys begins with the seed."""
        self._pages: dict[bytes, HashedPage] = {}
        """Maps page keys to the pages in host memory."""
        self._stored: set[bytes] = set()
        """Page keys that were also published for the storage tier; all are keys of `_pages`."""
        self._more: Counter[bytes] = Counter()
        """Maps a page key to the number of host pages with this key besides the one in `_pages`.

        A second page with the same key arises after a reset to earlier weights, if a request still
        holds the first page.
        """

    def listen(self, events: Iterable[Event]) -> None:
        """Add events to a queue; `take` converts them later and computes the block hashes."""
        for event in events:
            if isinstance(event, Stored | Removed):
                if event.pool == KV_POOL and event.tier is not Tier.DEVICE:
                    self._queued.append(event)
            elif isinstance(event, Reset):
                self._queued.append(event)

    def saw(
        self,
        request: VllmRequest,
        namespace: str,
        seed: Callable[[str], bytes],
        item_pages: Mapping[bytes, tuple[int, int]] | None = None,
    ) -> None:
        """Record the fields of a request that vLLM hashes.

        `seed` returns the key with which the hash chain of a namespace's page keys begins. `item_pages`
        is for pages in which multimodal items begin: it maps a page key to the page's (start, end) in
        tokens. If `item_pages` is None, the namespace identifies the items.
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
        """Yield the changes of published pages since the last call, in the order of the events."""
        queued, self._queued = self._queued, []
        for event in queued:
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
            # Skip pages whose request's hashed fields (adapter, salt, items) are unknown. The pages are
            # from before a reset and match no new request, or their namespace was forgotten.
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
                    # Stop before this page. vLLM's hash needs the names of its multimodal items, which
                    # were forgotten together with their request.
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
        """Yield the removal of all published pages, and compute seeds for the new weights."""
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
