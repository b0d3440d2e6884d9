"""The answers of the replica to an engine that wants to use the cache."""

from enum import StrEnum
from typing import NamedTuple


class Wait(StrEnum):
    """The reason why a request was not admitted. It holds nothing; ask again at a later step."""

    NO_ROOM = "no_room"
    """Too few device pages are free or can be evicted. There are enough once others let go."""
    LOADING = "loading"
    """Another request is loading back pages that this one needs too."""
    LOST = "lost"
    """What was retracted is gone: `load_back` the request again, and compute what is missing."""


class Dropped(NamedTuple):
    """What has left by `drop`, and what could not. Full-attention pages of both tiers together."""

    pages: int
    """How many have left."""
    held: int
    """How many stay for those who hold them: drop again once they have ended."""


class Admission(NamedTuple):
    """Where the cached prefix of an admitted request comes from. Lengths in tokens."""

    device_tokens: int
    """Tokens that were on the device already."""
    host_tokens: int
    """Tokens that come from host memory, where they were before this request's prefetch."""
    storage_tokens: int
    """Tokens that come from host memory, where this request's prefetch brought them from storage."""
    operation: int | None
    """The load back in flight, or None if nothing has to be loaded."""
    checkpoints: tuple[int, ...] = ()
    """Where the engine should end a chunk and `insert`, so that a recurrent state is kept there:
    at the regular distance, where the prompt leaves what is cached, and at its last whole page."""

    @property
    def cached_tokens(self) -> int:
        """The length of the whole cached prefix; the engine computes what follows it."""
        return self.device_tokens + self.host_tokens + self.storage_tokens
