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
"""Number of failed loads after which a request is computed."""


def may_be_cached(request: VllmRequest) -> bool:
    """Return whether a request's tokens and namespace determine its KV and will not change.

    Prompt embeddings have no token ids, and a resumable session may remove tokens. Items are identified
    by their contents, which must be in this process.
    """
    return (
        request.prompt_embeds is None
        and not request.resumable
        and all(isinstance(each.data, Mapping) for each in request.mm_features)
    )


def namespace_of(request: VllmRequest, adapter: str | None = None, items: Items = ()) -> str:
    """Return the namespace, without weights, that separates equal key ids with different KV.

    Its parts are the tenant's salt, the `adapter`'s identity, and `items` that do not fit into the key
    ids.
    """
    parts = {SALT: request.cache_salt, ADAPTER: adapter, "items": named_by_content(items)}
    return namespace_of_parts(parts)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """State that the plug-in keeps for a request between the engine's calls."""

    request: VllmRequest
    number: int
    """Position in order of arrival. vLLM's request ids are partly random and differ between ranks."""
    kind: str
    """The request's namespace without the weights."""
    page_tokens: int
    items: Items = ()
    item_ids: ItemIds | None = None
    """The prompt's ids with items replaced; None without items, or if the namespace has them."""
    device_tokens: int = 0
    """Length of the device prefix at the engine's last query."""
    lent_pages: int = 0
    """Whole pages of the prefix that were offered for backup since the last preemption."""
    state_pages: int = 0
    """Largest page count with an offered state that another engine could load."""
    namespace: str = ""
    """The namespace since the request started or restarted; see `weights`."""
    since: int = 0
    """Number of weight changes when the request entered its namespace."""
    computed: bool = False
    """Whether the request's device pages hold computed KV; False again after a preemption."""
    loaded: bool = False
    """Whether the request's device pages hold, or will hold, loaded KV."""
    failures: int = 0
    lives: int = 0
    stale: bool = False
    """Whether device pages depend on previous weights, so that no other request may get later pages."""
    refused: bool = False
    """Whether a load in flight counts as failed."""
    taken: AwaitedRequest | None = None
    """State of the handoff from another engine; None if no other engine has computed the prompt."""
    given: int = 0
    """Number of tokens promised to another engine, which reads them here; 0 for none."""
    _tokens: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.item_ids is not None:
            self._tokens += self.item_ids.head

    def give_up(self) -> None:
        """Record that the request's device pages hold nothing."""
        self.lent_pages = self.state_pages = 0
        self.computed = self.loaded = self.stale = self.refused = False

    @property
    def has_failed_enough(self) -> bool:
        """Whether so many loads have failed that the request is computed without further loads."""
        return self.failures >= FAILURES_MAX

    def tokens_after(self, scheduled: int) -> tuple[int, int]:
        """Return the tokens computed after a pass that schedules more, and how many of them are final.

        Draft tokens and tokens not sampled yet may still change.
        """
        computed = self.request.num_computed_tokens + scheduled
        return computed, min(computed, self.request.num_tokens)

    @property
    def is_local_only(self) -> bool:
        """Whether other engines can never match pages of the request's namespace."""
        return self.namespace.startswith(NO_PERSIST_PREFIX)

    @property
    def name(self) -> str:
        """The request's name, equal on every rank, and different after each restart."""
        return f"#{self.number}.{self.lives}" if self.lives else f"#{self.number}"

    @property
    def loadable_tokens(self) -> int:
        """Length of the longest prefix that may be loaded: whole pages, without the last token."""
        return self._loadable(self.request.num_tokens)

    @property
    def loadable_elsewhere(self) -> int:
        """Length of the longest prefix that another engine may load, which gets only the prompt."""
        return self._loadable(self.request.num_prompt_tokens)

    def head(self, tokens: int) -> bytes:
        """Return the first `tokens` ids as in keys: int32, little-endian."""
        have = len(self._tokens) // TOKEN_BYTES
        if tokens > have:
            fresh = self.request.all_token_ids[have:tokens]
            self._tokens += np.asarray(fresh, dtype="<i4").tobytes()
        return bytes(memoryview(self._tokens)[: tokens * TOKEN_BYTES])

    def item_pages(self, key: Callable[[bytes], bytes]) -> dict[bytes, tuple[int, int]] | None:
        """Return the token ranges of the prompt's pages with item ids, by key.

        None means that the namespace identifies the items. `key` returns the key for the ids up to a
        page's end.
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
    """A finished request that the cache does not know to be finished yet."""

    tracked: TrackedRequest
    loading: bool
    """Whether the engine waits for the load, and only for it, before it reuses the blocks."""
    fenced: bool
    """Whether the engine reuses the blocks immediately."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Results of a step for vLLM's scheduler, equal and in equal order on every rank.

    Requests are in order of arrival, because the scheduler frees blocks in this order and the engine's
    ids differ between ranks.
    """

    loaded: tuple[str, ...]
    """Requests whose load has completed or failed."""
    failed: tuple[str, ...]
    """Requests in `loaded` whose load failed."""
    freed: tuple[str, ...]
    """Finished requests whose blocks are free."""


def ids_of(requests: Iterable[TrackedRequest]) -> tuple[str, ...]:
    """Return the engine's ids of requests, in order of arrival."""
    return tuple(each.request.request_id for each in sorted(requests, key=lambda each: each.number))
