"""One request of the engine's as the plug-in keeps it: who may share its pages, and its tokens."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...ranks.replica.tree.node import PASSING
from ...ranks.replica.tree.tokens import TOKEN_BYTES
from ..items import ItemIds, Items, named_by_content
from ..namespaces import ADAPTER, SALT, namespace_of_parts
from .contract import VllmRequest
from .taking import Taken

FAILURES_MAX = 2
"""After so many loads of a request that have failed it computes."""


def may_be_cached(request: VllmRequest) -> bool:
    """Say whether a request's tokens, with its namespace, determine its KV, and do not change.

    Embeddings in the place of tokens have no ids, and a session that goes on takes tokens back. Items
    count by their contents, which must be here.
    """
    return (
        request.prompt_embeds is None
        and not request.resumable
        and all(isinstance(each.data, Mapping) for each in request.mm_features)
    )


def namespace_of(request: VllmRequest, adapter: str | None = None, items: Items = ()) -> str:
    """Return what keeps apart requests of the same ids in keys and of other KV, but for weights.

    The tenant's salt, what the `adapter`'s weights are, and the `items` for which the ids have no room.
    Empty if there are none of these.
    """
    parts = {SALT: request.cache_salt, ADAPTER: adapter, "items": named_by_content(items)}
    return namespace_of_parts(parts)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """Holds what the plug-in remembers of a request between the engine's calls."""

    request: VllmRequest
    number: int
    """Which one it is in the order of arrival: vLLM makes part of its ids up, on each rank anew."""
    kind: str
    """Its namespace without the weights."""
    page_tokens: int
    items: Items = ()
    item_ids: ItemIds | None = None
    """How its items are in its ids; None if it has none, or if its namespace has them."""
    device_tokens: int = 0
    """The prefix that the engine had when it last asked for more."""
    lent_pages: int = 0
    """Whole pages of its prefix that were offered for backup since it was last preempted."""
    state_pages: int = 0
    """After how many of these that another engine could load a state was offered too; the most."""
    namespace: str = ""
    """The one that it is in since it began, or began anew; see `weights`."""
    since: int = 0
    """How often the weights had changed when it began in its namespace."""
    computed: bool = False
    """Whether its device pages hold anything that it has computed; not once it is preempted."""
    loaded: bool = False
    """Whether they hold, or are to hold, what was loaded for it."""
    failures: int = 0
    """How many of its loads have failed."""
    lives: int = 0
    """How often it has begun anew."""
    stale: bool = False
    """Whether they hold something of former weights, so that nobody else may get what follows."""
    refused: bool = False
    """Whether a load that is under way is to count as failed."""
    taken: Taken | None = None
    """What another engine has computed of it."""
    given: int = 0
    """After how many tokens another engine goes on with it, which reads them here; 0 for none."""
    _tokens: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.item_ids is not None:
            self._tokens += self.item_ids.head

    def give_up(self) -> None:
        """Take note that its device pages hold nothing any more."""
        self.lent_pages = self.state_pages = 0
        self.computed = self.loaded = self.stale = self.refused = False

    @property
    def has_failed_enough(self) -> bool:
        """Whether so many of its loads have failed that it computes, and asks for no more."""
        return self.failures >= FAILURES_MAX

    def tokens_after(self, scheduled: int) -> tuple[int, int]:
        """Return how many tokens are computed after a pass that schedules some, and how many are known.

        Tokens that are only guessed, or not sampled yet, may still turn out to be others.
        """
        computed = self.request.num_computed_tokens + scheduled
        return computed, min(computed, self.request.num_tokens)

    @property
    def is_of_no_other_engine(self) -> bool:
        """Whether no other engine can have, or find, what is computed in its namespace."""
        return self.namespace.startswith(PASSING)

    @property
    def name(self) -> str:
        """The request's name on every rank, another one each time it begins anew."""
        return f"#{self.number}.{self.lives}" if self.lives else f"#{self.number}"

    @property
    def loadable_tokens(self) -> int:
        """The longest prefix that may come from the cache: whole pages, but for the last token."""
        return self._loadable(self.request.num_tokens)

    @property
    def loadable_elsewhere(self) -> int:
        """The same for another engine, which gets the prompt alone."""
        return self._loadable(self.request.num_prompt_tokens)

    def head(self, tokens: int) -> bytes:
        """Return the first `tokens` ids as they are in keys: int32, little-endian."""
        have = len(self._tokens) // TOKEN_BYTES
        if tokens > have:
            fresh = self.request.all_token_ids[have:tokens]
            self._tokens += np.asarray(fresh, dtype="<i4").tobytes()
        return bytes(memoryview(self._tokens)[: tokens * TOKEN_BYTES])

    def item_pages(self, key: Callable[[bytes], bytes]) -> dict[bytes, tuple[int, int]] | None:
        """Return the pages of its prompt whose ids stand for items; None if its namespace has these.

        By key, which `key` gives for the ids up to a page's end; each with its first token and its end.
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
class Ended:
    """A request that has ended, and of which the cache has not heard yet."""

    tracked: TrackedRequest
    loading: bool
    """The engine waits for the load, and for nothing else, to have its blocks back."""
    fenced: bool
    """Its blocks are the engine's again at once."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Says what the scheduler is to hear after a step, the same on every rank and in the same order.

    In the order of arrival: the scheduler frees blocks in the order in which it hears of them, and the
    engine's ids, which are others on each rank, have no order that all ranks could agree on.
    """

    loaded: tuple[str, ...]
    """Requests whose load is over, well or not."""
    failed: tuple[str, ...]
    """The requests in `loaded` whose load failed."""
    freed: tuple[str, ...]
    """Finished requests whose pages are free."""


def ids_of(requests: Iterable[TrackedRequest]) -> tuple[str, ...]:
    """Return the engine's ids of requests, in the order in which they arrived."""
    return tuple(each.request.request_id for each in sorted(requests, key=lambda each: each.number))
