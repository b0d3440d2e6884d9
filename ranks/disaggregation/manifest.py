"""The manifest of a handoff: all that a group must know to go on with a request where another stopped.

It is one for the whole group, whatever the sizes of the two. It names what is to be fetched and holds
no page: pages and tails are objects with names of their own, verified when they are read. What it says
is believed only where it is of the same namespace, weights and layout, and where the receiver computes
the same keys from the request's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgpack

from ...errors import UsageError
from ...page_format.namespace import Namespace, layouts_record
from ...page_format.page_layout import PageLayout
from ..arguments import require_source
from .refusal import Refusal, Refused

KEY_BYTES: Final = 32
TEXT_MAX: Final = 1 << 10
"""The most characters of a name."""
OPAQUE_BYTES_MAX: Final = 256 << 10
"""The most bytes of each state that only engines understand."""
POOLS_MAX: Final = 64
STATES_MAX: Final = 4096
TOKENS_MAX: Final = 1 << 40
TOKEN_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContents:
    """What there is of one pool: pages of tokens, a tail, states."""

    pool: str
    first_page: int
    """The first page of tokens that there is; others than full attention may lack those before it."""
    end_page: int
    """One more than the last whole page that there is."""
    tail: bool
    """Whether there is what lies behind the last whole page: a page that is not full, or a state."""
    states: tuple[int, ...] = ()
    """After how many pages of tokens a recurrent state was kept, ascending."""

    def __post_init__(self) -> None:
        require_text(self.pool, "pool")
        require_range(self.first_page, "first_page", TOKENS_MAX)
        require_range(self.end_page, "end_page", TOKENS_MAX)
        if self.first_page > self.end_page:
            raise UsageError(f"first_page is {self.first_page}, after end_page {self.end_page}")
        if len(self.states) > STATES_MAX:
            raise UsageError(f"{len(self.states)} states, must be at most {STATES_MAX}")
        for each in self.states:
            require_range(each, "a state", TOKENS_MAX)
        if list(self.states) != sorted(set(self.states)):
            raise UsageError("states are not ascending")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffManifest:
    """All that one group has of a request and another is to go on with."""

    request: str
    namespace_digest: str
    """The namespace of the model (`Namespace.digest`), as names of objects begin with it."""
    namespace: str
    """The namespace within the cache that the request's tokens are in: a tenant's salt, an adapter."""
    weights_version: str
    layout_fingerprint: str
    tokens: int
    """How many tokens have been computed, those of an output among them."""
    end_key: bytes
    """The key of the last whole page."""
    tail_key: bytes
    """The key of the tail; the end key where no tokens are behind the last whole page."""
    pools: tuple[PoolContents, ...]
    first_token: int
    """The token that follows those that were computed; the first of the output, as a rule."""
    sampling: bytes = b""
    """The engine's state of sampling: seeds, counts, the grammar's position."""
    speculation: bytes = b""
    """The engine's state of speculative decoding: hidden states and tokens of a draft."""
    metadata: bytes = b""
    """Small tensors of the request (`MetadataSlots.packed`)."""
    source: str = ""
    """Where pages are to be had directly, as a URI; empty stands for the store that groups share."""

    def __post_init__(self) -> None:
        require_request(self.request)
        require_hex(self.namespace_digest, "namespace_digest")
        require_hex(self.layout_fingerprint, "layout_fingerprint")
        for name in ("namespace", "weights_version", "source"):
            require_text(getattr(self, name), name)
        require_source(self.source)
        require_range(self.tokens, "tokens", TOKENS_MAX)
        require_range(self.first_token, "first_token", TOKEN_MAX)
        for name in ("end_key", "tail_key"):
            if len(getattr(self, name)) != KEY_BYTES:
                raise UsageError(
                    f"{name} has {len(getattr(self, name))} bytes, must be {KEY_BYTES}"
                )
        for name in ("sampling", "speculation", "metadata"):
            require_opaque(getattr(self, name), name)
        names = [each.pool for each in self.pools]
        if len(names) > POOLS_MAX or len(set(names)) != len(names):
            raise UsageError(f"{len(names)} pools, must be at most {POOLS_MAX}, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTerms:
    """What both groups of a handoff must have in common; sizes of groups are no part of it."""

    namespace_digest: str
    weights_version: str
    layout_fingerprint: str

    @classmethod
    def of(cls, namespace: Namespace) -> "HandoffTerms":
        """Return the terms of a group whose caches are of this namespace."""
        return cls(
            namespace_digest=namespace.digest(),
            weights_version=namespace.weights_version,
            layout_fingerprint=layout_fingerprint(namespace.layouts),
        )

    def require(self, manifest: HandoffManifest) -> None:
        """Raise `Refused` for a manifest that this group cannot go on with: its request is computed."""
        for refusal, name, theirs, ours in (
            (
                Refusal.WEIGHTS,
                "version of the weights",
                manifest.weights_version,
                self.weights_version,
            ),
            (
                Refusal.LAYOUT,
                "layout of pages",
                manifest.layout_fingerprint,
                self.layout_fingerprint,
            ),
            (Refusal.NAMESPACE, "namespace", manifest.namespace_digest, self.namespace_digest),
        ):
            if theirs != ours:
                raise Refused(
                    refusal,
                    f"the manifest of request {manifest.request!r} is of another {name}:"
                    f" {theirs[:80]!r}, and here it is {ours[:80]!r}",
                )


def layout_fingerprint(layouts: Mapping[str, PageLayout]) -> str:
    """Return 64 hex digits that differ where pages do: tokens of a page, columns, pools.

    Optional columns count, and whether an engine keeps them does not: what it needs and an object lacks
    is a miss when that is read.
    """
    packed: bytes = msgpack.packb(["lockstep-handoff-layout-1", layouts_record(layouts)])
    return sha256(packed).hexdigest()


def require_request(name: str) -> None:
    """Raise `UsageError` for what is no name of a request."""
    require_text(name, "request")
    if not name:
        raise UsageError("request is empty")
    if "\0" in name:
        raise UsageError("request has a character 0, which is for names of our own")


def require_text(text: str, name: str) -> None:
    """Raise `UsageError` for text that is too long, or that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} must be text that UTF-8 can hold: {error}") from error
    if len(text) > TEXT_MAX:
        raise UsageError(f"{name} has {len(text)} characters, must be at most {TEXT_MAX}")


def require_range(number: int, name: str, largest: int) -> None:
    """Raise `UsageError` for a number that is negative or too large."""
    if not 0 <= number <= largest:
        raise UsageError(f"{name} is {number}, must be 0 to {largest}")


def require_opaque(data: bytes, name: str) -> None:
    """Raise `UsageError` for more bytes than an engine's state may have."""
    if len(data) > OPAQUE_BYTES_MAX:
        raise UsageError(f"{name} has {len(data)} bytes, must be at most {OPAQUE_BYTES_MAX}")


def require_hex(text: str, name: str) -> None:
    """Raise `UsageError` for what is no digest as 64 hex digits."""
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise UsageError(f"{name} is {text[:80]!r}, must be 64 hex digits")
