"""What a group and those who route requests tell each other, beside the requests themselves.

A router asks a group for its events, and from then on is told of them and of how requests go. All of
them are control messages; who loses one asks again.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ...errors import UsageError
from .manifest import TOKENS_MAX, require_range, require_request, require_text

LIFE_MAX: Final = 1 << 62
PARTS_MAX: Final = 1 << 16
"""The most parts of a snapshot."""
REQUESTS_ASKED_MAX: Final = 256
"""The most requests that one message asks after."""
TIME_US_MAX: Final = 1 << 60


class Milestone(StrEnum):
    """How far a request is in one group."""

    COMPUTED = "computed"
    """Its prompt is computed, and its first token is known."""
    READY = "ready"
    """All that its output needs is on the device."""
    DONE = "done"
    """It has left, with its whole output where the group decodes."""
    REFUSED = "refused"
    """It can never fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """No more requests come: end when those that are here have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A request has come to a stage in a group."""

    group: str
    request: str
    stage: str
    at_us: int
    """When, in microseconds since 1970 by the clock of the group's rank 0."""
    hit_tokens: int = 0
    """How many tokens of its prompt were cached there."""
    computed_tokens: int = 0
    """How many were computed there."""

    def __post_init__(self) -> None:
        require_text(self.group, "group")
        require_request(self.request)
        if self.stage not in set(Milestone):
            raise UsageError(f"stage is {self.stage[:40]!r}, must be one of {[*Milestone]}")
        require_range(self.at_us, "at_us", TIME_US_MAX)
        require_range(self.hit_tokens, "hit_tokens", TOKENS_MAX)
        require_range(self.computed_tokens, "computed_tokens", TOKENS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a group has counted, once the requests that it had have left."""

    group: str
    data: bytes
    """As whoever launched the group writes it."""

    def __post_init__(self) -> None:
        require_text(self.group, "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsWanted:
    """Tell whoever has its inbox at `reader` all events from batch `first` on, and of requests."""

    reader: str
    life: int
    """The life of the group that the reader knows of."""
    first: int

    def __post_init__(self) -> None:
        require_text(self.reader, "reader")
        require_range(self.life, "life", LIFE_MAX)
        require_range(self.first, "first", LIFE_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsWanted:
    """Tell whoever has its inbox at `reader` of these requests, which the group has taken."""

    reader: str
    requests: tuple[str, ...]

    def __post_init__(self) -> None:
        require_text(self.reader, "reader")
        require_range(len(self.requests), "number of requests", REQUESTS_ASKED_MAX)
        for each in self.requests:
            require_request(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsTold:
    """How the requests are after which was asked; a level."""

    group: str
    here: tuple[str, ...] = ()
    ended: tuple[Progress, ...] = ()
    """How those have left that have."""
    unknown: tuple[str, ...] = ()
    """Those of which the group knows nothing, or nothing any more."""

    def __post_init__(self) -> None:
        require_text(self.group, "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsTold:
    """One batch of a group's KV events."""

    group: str
    life: int
    sequence: int
    payload: bytes
    """As vLLM writes it (`groups/event_wire.py`)."""

    def __post_init__(self) -> None:
        require_text(self.group, "group")
        require_range(self.life, "life", LIFE_MAX)
        require_range(self.sequence, "sequence", LIFE_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTold:
    """A part of all that a group has; the parts together are the bytes of a snapshot."""

    group: str
    life: int
    batches: int
    """How many batches are in it. Parts of different snapshots make none together."""
    part: int
    parts: int
    data: bytes

    def __post_init__(self) -> None:
        require_text(self.group, "group")
        require_range(self.life, "life", LIFE_MAX)
        require_range(self.batches, "batches", LIFE_MAX)
        require_range(self.parts, "parts", PARTS_MAX)
        if not 0 <= self.part < self.parts:
            raise UsageError(f"part is {self.part}, must be from 0 to parts - 1 = {self.parts - 1}")
