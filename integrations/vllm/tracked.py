"""One request of the engine's as the plug-in keeps it: who may share its pages, and its tokens."""

from dataclasses import dataclass, field

import numpy as np

from ...ranks.replica.tree.tokens import TOKEN_BYTES
from ..namespaces import ADAPTER, SALT, namespace_of_parts
from .contract import VllmRequest


def may_be_cached(request: VllmRequest) -> bool:
    """Say whether a request's tokens, with its namespace, determine its KV, and do not change.

    Embeddings in the place of tokens have no ids, and a session that goes on takes tokens back.
    """
    return request.prompt_embeds is None and not request.resumable


def namespace_of(request: VllmRequest, adapter: str | None = None) -> str:
    """Return what keeps apart requests whose tokens are the same and whose KV is not.

    The tenant's salt, what the `adapter`'s weights are, and the items of other modalities, whose
    tokens are placeholders. Empty if there are none of these.
    """
    items = [
        [each.identifier, each.mm_position.offset, each.mm_position.length]
        for each in request.mm_features
    ]
    return namespace_of_parts({SALT: request.cache_salt, ADAPTER: adapter, "items": items})


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """Holds what the plug-in remembers of a request between the engine's calls."""

    request: VllmRequest
    number: int
    """Which one it is in the order of arrival: vLLM makes part of its ids up, on each rank anew."""
    namespace: str
    page_tokens: int
    device_tokens: int = 0
    """The prefix that the engine had when it last asked for more."""
    lent_pages: int = 0
    """Whole pages of its prefix that were offered for backup since it was last preempted."""
    computed: bool = False
    """Whether its device pages hold anything; not any more once it is preempted."""
    failures: int = 0
    """How many of its loads have failed."""
    stale: bool = False
    """Whether they hold what was computed before a reset, which nobody may get."""
    _tokens: bytearray = field(default_factory=bytearray)

    @property
    def name(self) -> str:
        """The request's name on every rank; another one after each load that has failed."""
        return f"#{self.number}" + (f".{self.failures}" if self.failures else "")

    @property
    def loadable_tokens(self) -> int:
        """The longest prefix that may come from the cache: whole pages, but for the last token."""
        length = max(0, self.request.num_tokens - 1)
        return length - length % self.page_tokens

    def head(self, tokens: int) -> bytes:
        """Return the first `tokens` token ids as int32, little-endian."""
        have = len(self._tokens) // TOKEN_BYTES
        if tokens > have:
            fresh = self.request.all_token_ids[have:tokens]
            self._tokens += np.asarray(fresh, dtype="<i4").tobytes()
        return bytes(memoryview(self._tokens)[: tokens * TOKEN_BYTES])
