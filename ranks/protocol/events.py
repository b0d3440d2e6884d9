"""Events of the replica: one ordered stream, the same on every rank.

Statistics, published events and reports are derived from this stream alone. Emitting an event never
changes the replica's state, so a driver may ignore all of them.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from ...coordinator.operation import OperationKind, Outcome


class Tier(StrEnum):
    """The tier that pages are on."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Cause(StrEnum):
    """Why pages were added to a tier or removed from it."""

    COMPUTED = "computed"
    BACKED_UP = "backed_up"
    FETCHED = "fetched"
    """A prefetch read the pages from storage."""
    LOADED = "loaded"
    PERSISTED = "persisted"
    ROOM = "room"
    """The pages were evicted to make room for others."""
    LIMIT = "limit"
    """The pages were evicted because their namespace exceeded its quota, or because the pages exceeded
    their time to live."""
    RESET = "reset"
    DROPPED = "dropped"
    """An operator or the engine removed the pages with `drop`."""
    FAILED = "failed"
    """A copy of the pages failed, so the pages must not be matched again."""


class MissReason(StrEnum):
    """Why a prefetch brought no pages, or fewer pages than requested."""

    NOT_STORED = "not_stored"
    """The page is in no rank's store."""
    ONE_RANK_LACKS_IT = "one_rank_lacks_it"
    UNREADABLE = "unreadable"
    """The page's object was lost, corrupt or unreadable."""
    LATE = "late"
    """The prefetch reached a deadline in the queue, during the lookup or during the read."""
    NO_ROOM = "no_room"
    """Host memory had no free page to read the page into."""
    ABANDONED = "abandoned"
    """The prefetch was stopped because no request waits for it any more."""


class Stored(NamedTuple):
    """Pages were added to a tier on every rank, and prefix matches on that tier can find them."""

    tier: Tier
    pool: str
    pages: int
    cause: Cause
    after: bytes = b""
    """The key of the page that precedes the first of `keys` in its prefix."""
    keys: tuple[bytes, ...] = ()
    """The pages' keys in prefix order; empty unless the cache was opened with a listener."""
    tokens: bytes = b""
    """The tokens of the pages, if the pages were added to the device or to host memory."""


class Removed(NamedTuple):
    """Pages were removed from a tier on every rank."""

    tier: Tier
    pool: str
    pages: int
    cause: Cause
    keys: tuple[bytes, ...] = ()
    """The pages' keys; empty unless the cache was opened with a listener."""


class MissedTokens(NamedTuple):
    """Numbers of requested tokens that no tier provided, by cause; see `replica.core.misses`."""

    lost: int = 0
    """Number of tokens whose pages were expected in storage or host memory, but were not delivered."""
    evicted: int = 0
    """Number of tokens that were requested or computed in this namespace before, and whose pages are in
    no tier now."""
    other_key: int = 0
    """Number of tokens that were requested before, but only in other namespaces: of another tenant,
    adapter or weights version."""
    never_seen: int = 0


class Hit(NamedTuple):
    """A request was admitted, with its number of cached tokens on each tier and its missed tokens."""

    request: str
    tokens: int
    """Number of tokens that the request asked the cache for, cached or not."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    """Number of tokens that the request's prefetch loaded to host memory; not counted in `host_tokens`.
    """
    missed: MissedTokens = MissedTokens()
    """Numbers of requested tokens that no tier provided, by cause."""
    source: str = ""
    """The group that the prefetch read `storage_tokens` from; empty if it read from the store."""


class Missed(NamedTuple):
    """A prefetch brought fewer pages than requested."""

    request: str
    pages: int
    """Number of full-attention pages missing."""
    why: MissReason


OTHERS_HAVE_IT: Final = "other ranks' stores have it"
"""A `reason` of a missing page. With this reason, the event's rank lacks the page, but another rank's
store has it. With any other reason, the event's rank is the first that reported the page missing."""


class MissingOnRank(NamedTuple):
    """A prefetch ended early at the first page that some rank could not provide."""

    operation: int
    request: str
    rank: int | None
    page: int
    """Index of the unavailable page among the pages that the prefetch requested."""
    key: bytes
    reason: str


class Finished(NamedTuple):
    """An operation finished on every rank and holds no pages any more."""

    operation: int
    kind: OperationKind
    outcome: Outcome


class NotBegun(NamedTuple):
    """An operation was not started because memory or a queue had no room for it."""

    kind: OperationKind


class Quarantined(NamedTuple):
    """A stopped operation's pages are quarantined because its I/O did not end before the deadline."""

    operation: int
    kind: OperationKind
    rank: int | None
    """The rank on which the I/O hangs; None if unknown."""


class StoreChanged(NamedTuple):
    """A store was attached, is being detached, or was detached."""

    number: int
    """Number of stores attached so far."""
    state: str
    reason: str = ""
    """The reason for the detach; None if an operator requested it."""


class Reset(NamedTuple):
    """Every page cached so far became unmatchable. Pages held by requests are freed later."""

    generation: int
    weights_version: str | None


Event = (
    Stored
    | Removed
    | Hit
    | Missed
    | MissingOnRank
    | Finished
    | NotBegun
    | Quarantined
    | StoreChanged
    | Reset
)
