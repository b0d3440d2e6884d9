"""Notices of what has happened: one stream, in order, the same on every rank.

Statistics, events and reports are folded from these and from nothing else. A notice changes nothing,
and whoever reads none of them loses nothing but what they tell.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from ...coordinator.operation import Kind, Outcome


class Tier(StrEnum):
    """The tier that pages are on."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Cause(StrEnum):
    """Why pages came to a tier, or left it."""

    COMPUTED = "computed"
    """A request has computed them."""
    BACKED_UP = "backed_up"
    FETCHED = "fetched"
    """A prefetch has brought them from storage."""
    LOADED = "loaded"
    PERSISTED = "persisted"
    ROOM = "room"
    """Others needed the room."""
    LIMIT = "limit"
    """Their namespace keeps no more, or not for so long."""
    RESET = "reset"
    DROPPED = "dropped"
    """Somebody has said so (`drop`)."""
    FAILED = "failed"
    """A copy of them has failed, so no request shall find them again."""


class Why(StrEnum):
    """Why a prefetch brought nothing, or less than it asked for."""

    NOT_STORED = "not_stored"
    """No rank's store has it."""
    ONE_RANK_LACKS_IT = "one_rank_lacks_it"
    UNREADABLE = "unreadable"
    """It was lost, damaged or could not be read."""
    LATE = "late"
    """A deadline passed, in the queue, at the lookup or at the read."""
    NO_ROOM = "no_room"
    """Host memory had no page for it."""
    ABANDONED = "abandoned"
    """Nobody waits for it any more."""


class Stored(NamedTuple):
    """Pages came to a tier, on every rank, and can be found there."""

    tier: Tier
    pool: str
    pages: int
    cause: Cause
    after: bytes = b""
    """The key before the first of `keys`."""
    keys: tuple[bytes, ...] = ()
    """The keys of the pages, in prefix order, where the cache was told to name pages."""
    tokens: bytes = b""
    """The tokens of those pages, where they came to the device or to host memory."""


class Removed(NamedTuple):
    """Pages left a tier on every rank."""

    tier: Tier
    pool: str
    pages: int
    cause: Cause
    keys: tuple[bytes, ...] = ()
    """The keys of the pages, where the cache was told to name pages."""


class MissedTokens(NamedTuple):
    """Tokens that a request asked for and that no tier has, by cause; see `replica.core.misses`."""

    lost: int = 0
    """Storage has or had them, and did not bring them."""
    evicted: int = 0
    """They have left, or found no room in, host memory."""
    other_key: int = 0
    """They were seen under another key: of a tenant, an adapter, or former weights."""
    never_seen: int = 0


class Hit(NamedTuple):
    """A request was admitted: how much of its tokens every rank has, where, and why not the rest."""

    request: str
    tokens: int
    """How many it could have used."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    """Tokens that its prefetch has brought to host memory before; not among `host_tokens`."""
    missed: MissedTokens = MissedTokens()
    """The rest of `tokens`."""
    source: str = ""
    """The group that it brought them from; empty for the store."""


class Missed(NamedTuple):
    """A prefetch brought less than it asked for."""

    request: str
    pages: int
    """How many pages of full attention it lacked."""
    why: Why


OTHERS_HAVE_IT: Final = "other ranks' stores have it"
"""Why a rank lacks what others do not. For other reasons it only is the first to say so."""


class Lacking(NamedTuple):
    """A prefetch ended at what a rank could not bring."""

    operation: int
    request: str
    rank: int | None
    page: int
    """The first page of the operation's that was not to be had."""
    key: bytes
    reason: str


class Finished(NamedTuple):
    """An operation has ended on every rank, and keeps nothing any more."""

    operation: int
    kind: Kind
    outcome: Outcome


class NotBegun(NamedTuple):
    """There was something to do, and no room to begin it."""

    kind: Kind


class Quarantined(NamedTuple):
    """An operation that was stopped did not fall quiet in time: what it keeps is out of use."""

    operation: int
    kind: Kind
    rank: int | None
    """The rank on which it hangs, as far as is known."""


class StoreChanged(NamedTuple):
    """A store was attached, is being let go of, or was."""

    number: int
    """How many stores there have been."""
    state: str
    reason: str = ""
    """Why, if nobody has asked for it."""


class Reset(NamedTuple):
    """Nothing that was stored on any tier before is found any more; what requests hold leaves later."""

    generation: int
    weights_version: str | None


Notice = (
    Stored
    | Removed
    | Hit
    | Missed
    | Lacking
    | Finished
    | NotBegun
    | Quarantined
    | StoreChanged
    | Reset
)
