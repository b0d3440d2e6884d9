"""The plug-in's state of one request: its namespace, its tokens and its progress."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...ranks.replica.tree.node import NO_PERSIST_PREFIX
from ...ranks.replica.tree.tokens import TOKEN_BYTES
from ..items import ItemIds, Items, named_by_content
from ..namespaces import ADAPTER, SALT, namespace_of_parts
from .consumer import AwaitedRequest
from .contract import VllmRequest

FAILURES_MAX = 2
"""Number of failed loads after which a request is computed without further loads."""


def may_be_cached(request: VllmRequest) -> bool:
    """Return whether a request's tokens and namespace determine its KV and will not change.

    Requests with prompt embeddings are not cached, because embeddings have no token ids. Resumable
    requests are not cached, because clients may remove their tokens. Multimodal items need content in
    this process.
    """
    return (
        request.prompt_embeds is None
        and not request.resumable
        and all(isinstance(each.data, Mapping) for each in request.mm_features)
    )


def namespace_of(request: VllmRequest, adapter: str | None = None, items: Items = ()) -> str:
    """Return a request's namespace without the part that names the weights.

    The namespace separates requests that have equal key ids but different KV. Its parts are the
    tenant's salt, the `adapter`'s identity, and `items` (multimodal items that do not fit into the key
    ids).
    """
    parts = {SALT: request.cache_salt, ADAPTER: adapter, "items": named_by_content(items)}
    return namespace_of_parts(parts)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """State that the plug-in keeps for a request between the engine's calls."""

    request: VllmRequest
    number: int
    """Number of the request in order of arrival, because vLLM's request ids differ between ranks."""
    kind: str
    """The request's namespace without the part that names the weights."""
    page_tokens: int
    items: Items = ()
    item_ids: ItemIds | None = None
    """Key ids of a prompt with multimodal items; None without items, or if the namespace has the items.
    """
    device_tokens: int = 0
    """Number of the request's tokens that vLLM's own prefix cache had when vLLM last queried."""
    lent_pages: int = 0
    """Number of the prefix's whole pages that were passed to a backup since the last preemption."""
    state_pages: int = 0
    """Number of pages of the longest backup with a state from which another engine can continue."""
    namespace: str = ""
    """The current namespace, including the weights; set by `WeightsTracker.place`."""
    since: int = 0
    """Number of weight changes (`WeightsTracker.changes`) when `namespace` was set."""
    computed: bool = False
    """Whether the request's device pages hold computed KV; reset by a preemption."""
    loaded: bool = False
    """Whether a load into the request's device pages has started; reset by a preemption."""
    failures: int = 0
    lives: int = 0
    stale: bool = False
    """Whether device pages depend on previous weights, so that the request's pages must not be shared.
    """
    refused: bool = False
    """Whether the current load counts as failed even if all its copies succeed."""
    taken: AwaitedRequest | None = None
    """State of the wait for another engine's pages; None if no other engine has computed the prompt."""
    given: int = 0
    """Number of tokens that another engine was promised and reads from this group; 0 if none."""
    _tokens: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.item_ids is not None:
            self._tokens += self.item_ids.head

    def give_up(self) -> None:
        """Record that the request has lost its device pages."""
        self.lent_pages = self.state_pages = 0
        self.computed = self.loaded = self.stale = self.refused = False

    @property
    def has_failed_enough(self) -> bool:
        """Whether the request is computed without more loads, after `FAILURES_MAX` failed loads."""
        return self.failures >= FAILURES_MAX

    def tokens_after(self, scheduled: int) -> tuple[int, int]:
        """Return the number of tokens computed after this pass, and how many of those are final.

        Draft tokens and tokens that are not sampled yet are not final, because they may still change.
        """
        computed = self.request.num_computed_tokens + scheduled
        return computed, min(computed, self.request.num_tokens)

    @property
    def is_local_only(self) -> bool:
        """Whether no other engine can match the request's pages, because the weights are unnamed."""
        return self.namespace.startswith(NO_PERSIST_PREFIX)

    @property
    def name(self) -> str:
        """The request's name in the cache: equal on every rank, and different after each restart."""
        return f"#{self.number}.{self.lives}" if self.lives else f"#{self.number}"

    @property
    def loadable_tokens(self) -> int:
        """Number of tokens that may be loaded: whole pages that do not contain the last token."""
        return self._loadable(self.request.num_tokens)

    @property
    def loadable_elsewhere(self) -> int:
        """Number of tokens that another engine, which gets only the prompt, may load."""
        return self._loadable(self.request.num_prompt_tokens)

    def head(self, tokens: int) -> bytes:
        """Return the first `tokens` key ids, as little-endian int32."""
        have = len(self._tokens) // TOKEN_BYTES
        if tokens > have:
            fresh = self.request.all_token_ids[have:tokens]
            self._tokens += np.asarray(fresh, dtype="<i4").tobytes()
        return bytes(memoryview(self._tokens)[: tokens * TOKEN_BYTES])

    def item_pages(self, key: Callable[[bytes], bytes]) -> dict[bytes, tuple[int, int]] | None:
        """Return the token ranges of the prompt's pages in which multimodal items begin, by page key.

        None means that the namespace identifies the items. `key` returns the page key for all ids up to
        the page's end.
        """
        if self.item_ids is None:
            return None if self.items else {}
        unit = self.page_tokens
        spans = [(page * unit, (page + 1) * unit) for page in self.item_ids.pages]
        return {
            key(self.head(end)): (start, end)
            for start, end in spans
            if end <= self.request.num_prompt_tokens
        }

    def _loadable(self, known: int) -> int:
        length = max(0, known - 1)
        return length - length % self.page_tokens


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that the engine has finished, but whose commands were not issued yet."""

    tracked: TrackedRequest
    loading: bool
    """Whether the blocks stay allocated only until the request's load has finished."""
    fenced: bool
    """Whether the engine reuses the blocks at once, so that copies must be awaited first."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Results of one step for vLLM's scheduler; equal and in the same order on every rank.

    Requests are in order of arrival, because the scheduler frees blocks in this order and vLLM's
    request ids differ between ranks.
    """

    loaded: tuple[str, ...]
    """Ids of requests whose load has completed or failed."""
    failed: tuple[str, ...]
    """Ids of the requests in `loaded` whose load has failed."""
    freed: tuple[str, ...]
    """Ids of finished requests whose blocks are free."""


def ids_of(requests: Iterable[TrackedRequest]) -> tuple[str, ...]:
    """Return vLLM's ids of these requests, in order of arrival."""
    return tuple(each.request.request_id for each in sorted(requests, key=lambda each: each.number))
