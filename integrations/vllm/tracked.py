"""The plug-in's state of one vLLM request: its namespace, its tokens and its progress."""

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
    """Return whether a request's tokens and namespace determine its KV and cannot change later.

    Requests with prompt embeddings are not cached, because embeddings have no token ids. Resumable
    requests are not cached, because clients may remove their tokens. Requests with multimodal items are
    cached only if the items' contents are in this process.
    """
    return (
        request.prompt_embeds is None
        and not request.resumable
        and all(isinstance(each.data, Mapping) for each in request.mm_features)
    )


def namespace_of(request: VllmRequest, adapter: str | None = None, items: Items = ()) -> str:
    """Return a request's namespace without the part that names the weights.

    The namespace separates requests that have equal key ids but different KV. Its parts are the
    tenant's salt, the `adapter`'s identity, and `items` (multimodal items that the key ids cannot
    identify).
    """
    parts = {SALT: request.cache_salt, ADAPTER: adapter, "items": named_by_content(items)}
    return namespace_of_parts(parts)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The plug-in's state of one request, kept between vLLM's calls."""

    request: VllmRequest
    number: int
    """The request's number in order of arrival, equal on every rank, unlike vLLM's request id."""
    kind: str
    """The request's namespace without the part that names the weights."""
    page_tokens: int
    items: Items = ()
    item_ids: ItemIds | None = None
    """Key ids of a prompt with multimodal items; None without items, or if the namespace identifies
    them."""
    device_tokens: int = 0
    """Number of the request's tokens that vLLM's own prefix cache had at vLLM's last query."""
    lent_pages: int = 0
    """Number of the request's whole pages that were passed to backups since the last preemption."""
    state_pages: int = 0
    """Length in pages of the longest prefix that was backed up together with its recurrent state, so
    that another engine can continue from it."""
    namespace: str = ""
    """The current namespace, including the weights; set by `WeightsTracker.place`."""
    since: int = 0
    """Value of `WeightsTracker.changes` (number of weight changes) when `namespace` was set."""
    computed: bool = False
    """Whether the request has computed KV into its device pages since the last preemption."""
    loaded: bool = False
    """Whether a load into the request's device pages has started since the last preemption."""
    failures: int = 0
    lives: int = 0
    stale: bool = False
    """Whether the request's KV depends on previous weights, so that its pages must not be shared."""
    refused: bool = False
    """Whether the current load counts as failed even if all its copies succeed."""
    taken: AwaitedRequest | None = None
    """State of the wait for another engine's pages; None if no other engine has computed the prompt."""
    given: int = 0
    """Number of tokens of the prompt that this engine has promised to another engine; 0 if none."""
    _tokens: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.item_ids is not None:
            self._tokens += self.item_ids.head

    def give_up(self) -> None:
        """Reset the progress of a request that has lost its device pages."""
        self.lent_pages = self.state_pages = 0
        self.computed = self.loaded = self.stale = self.refused = False

    @property
    def has_failed_enough(self) -> bool:
        """Whether `FAILURES_MAX` loads have failed, so that the request is computed without more."""
        return self.failures >= FAILURES_MAX

    def tokens_after(self, scheduled: int) -> tuple[int, int]:
        """Return (number of tokens computed after this pass, number of those that are final).

        Draft tokens and tokens that are not sampled yet are not final, because they may still change.
        """
        computed = self.request.num_computed_tokens + scheduled
        return computed, min(computed, self.request.num_tokens)

    @property
    def is_local_only(self) -> bool:
        """Whether the weights have no name, so that only this engine can match the request's pages."""
        return self.namespace.startswith(NO_PERSIST_PREFIX)

    @property
    def name(self) -> str:
        """The request's name in the cache: equal on every rank, and changed by each restart."""
        return f"#{self.number}.{self.lives}" if self.lives else f"#{self.number}"

    @property
    def loadable_tokens(self) -> int:
        """Number of tokens that may be loaded: whole pages, without the request's last token."""
        return self._loadable(self.request.num_tokens)

    @property
    def loadable_elsewhere(self) -> int:
        """Number of tokens that another engine may load: only prompt tokens, no output tokens."""
        return self._loadable(self.request.num_prompt_tokens)

    def head(self, tokens: int) -> bytes:
        """Return the first `tokens` key ids, as little-endian int32."""
        have = len(self._tokens) // TOKEN_BYTES
        if tokens > have:
            fresh = self.request.all_token_ids[have:tokens]
            self._tokens += np.asarray(fresh, dtype="<i4").tobytes()
        return bytes(memoryview(self._tokens)[: tokens * TOKEN_BYTES])

    def item_pages(self, key: Callable[[bytes], bytes]) -> dict[bytes, tuple[int, int]] | None:
        """Return (start, end) in tokens for each page in which multimodal items begin, by page key.

        Returns None if the namespace identifies the items. `key` returns the key of a page, given all
        ids up to the page's end.
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
    """A request that vLLM has finished, and whose commands have not been issued yet."""

    tracked: TrackedRequest
    loading: bool
    """Whether vLLM keeps the request's blocks only until the load in flight ends."""
    fenced: bool
    """Whether vLLM reuses the blocks at once, so that copies must be awaited first."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Results of one step for vLLM's scheduler; equal and in the same order on every rank.

    Requests are in order of arrival, because the scheduler frees blocks in this order, and the order of
    vLLM's request ids differs between ranks.
    """

    loaded: tuple[str, ...]
    """vLLM's ids of requests whose load has completed or failed."""
    failed: tuple[str, ...]
    """vLLM's ids of those requests in `loaded` whose load has failed."""
    freed: tuple[str, ...]
    """vLLM's ids of finished requests whose blocks are free."""


def ids_of(requests: Iterable[TrackedRequest]) -> tuple[str, ...]:
    """Return vLLM's ids of these requests, sorted by order of arrival."""
    return tuple(each.request.request_id for each in sorted(requests, key=lambda each: each.number))
