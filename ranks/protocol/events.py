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
    """The pages were evicted to make room."""
    LIMIT = "limit"
    """The namespace exceeded its quota or time to live."""
    RESET = "reset"
    DROPPED = "dropped"
    """An operator or the engine removed the pages with `drop`."""
    FAILED = "failed"
    """A copy of the pages failed, so the pages must not be matched again."""


class MissReason(StrEnum):
    """Why a prefetch brought nothing, or fewer pages than requested."""

    NOT_STORED = "not_stored"
    """The page is in no rank's store."""
    ONE_RANK_LACKS_IT = "one_rank_lacks_it"
    UNREADABLE = "unreadable"
    """The page was lost, corrupt or unreadable."""
    LATE = "late"
    """A deadline passed: in the queue, during lookup or during the read."""
    NO_ROOM = "no_room"
    """No host page was free for the page."""
    ABANDONED = "abandoned"
    """No request waits for the prefetch any more."""


class Stored(NamedTuple):
    """Pages were added to a tier on every rank and can be matched there."""

    tier: Tier
    pool: str
    pages: int
    cause: Cause
    after: bytes = b""
    """The key of the page before the first of `keys`."""
    keys: tuple[bytes, ...] = ()
    """The pages' keys in prefix order; empty unless the cache was opened with a listener."""
    tokens: bytes = b""
    """The pages' tokens, for pages that were added to the device or to host memory."""


class Removed(NamedTuple):
    """Pages were removed from a tier on every rank."""

    tier: Tier
    pool: str
    pages: int
    cause: Cause
    keys: tuple[bytes, ...] = ()
    """The pages' keys; empty unless the cache was opened with a listener."""


class MissedTokens(NamedTuple):
    """Requested tokens that no tier has, by cause (see `replica.core.misses`)."""

    lost: int = 0
    """Tokens that storage has or had and did not deliver."""
    evicted: int = 0
    """Tokens evicted from host memory, or that never fitted in it."""
    other_key: int = 0
    """Tokens seen under another key: of another tenant, adapter or version of the weights."""
    never_seen: int = 0


class Hit(NamedTuple):
    """A request was admitted: number of cached tokens on each tier, and causes of the missing ones."""

    request: str
    tokens: int
    """How many tokens the request could have used."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    """Tokens that the request's own prefetch loaded to host memory; not counted in `host_tokens`."""
    missed: MissedTokens = MissedTokens()
    """Requested tokens that no tier had, by cause."""
    source: str = ""
    """The group that `storage_tokens` were read from; empty for the store."""


class Missed(NamedTuple):
    """A prefetch brought fewer pages than requested."""

    request: str
    pages: int
    """Number of full-attention pages missing."""
    why: MissReason


OTHERS_HAVE_IT: Final = "other ranks' stores have it"
"""Reason for a page missing on this rank only. With any other reason the rank is merely the first to
report."""


class MissingOnRank(NamedTuple):
    """A prefetch was cut short at the first page that a rank could not provide."""

    operation: int
    request: str
    rank: int | None
    page: int
    """The first unavailable page, as an index into the operation's pages."""
    key: bytes
    reason: str


class Finished(NamedTuple):
    """An operation finished on every rank and holds no pages any more."""

    operation: int
    kind: OperationKind
    outcome: Outcome


class NotBegun(NamedTuple):
    """An operation was not started because there was no room for it."""

    kind: OperationKind


class Quarantined(NamedTuple):
    """I/O of a stopped operation outlasted its deadline, so its pages are quarantined."""

    operation: int
    kind: OperationKind
    rank: int | None
    """The rank on which the I/O hangs, if known."""


class StoreChanged(NamedTuple):
    """A store was attached, is being detached, or was detached."""

    number: int
    """Number of stores attached so far."""
    state: str
    reason: str = ""
    """Why the store was detached, unless an operator requested the detach."""


class Reset(NamedTuple):
    """All pages stored before can no longer be matched; pages held by requests are freed later."""

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
