"""Return values of the replica's admission and drop commands."""

from enum import StrEnum
from typing import NamedTuple


class Wait(StrEnum):
    """The reason why a request was not admitted. The request holds no pages; retry at a later step."""

    NO_ROOM = "no_room"
    """Too few device pages are free or evictable. Retry after other requests have released theirs."""
    LOADING = "loading"
    """Another request is already loading back pages that this request needs."""
    LOST = "lost"
    """Pages of the retracted request were evicted. Call `load_back` and recompute the missing tokens.
    """


class Dropped(NamedTuple):
    """Numbers of full-attention pages that `drop` removed and could not remove, device plus host."""

    pages: int
    held: int
    """Number of pages that `drop` could not remove, because requests or operations still hold them.
    Call `drop` again after those have finished."""


class Admission(NamedTuple):
    """How many tokens of an admitted request's cached prefix come from which tier."""

    device_tokens: int
    """Number of cached tokens that were already on the device."""
    host_tokens: int
    """Number of cached tokens in host memory that were there before this request's prefetch."""
    storage_tokens: int
    """Number of cached tokens that this request's prefetch read from storage to host memory."""
    operation: int | None
    """The id of the load back in flight, or None if nothing has to be loaded."""
    checkpoints: tuple[int, ...] = ()
    """Prefix lengths in tokens at which the engine should end a chunk and call `insert`, so that the
    recurrent state is kept there: every `checkpoint_tokens`, the end of the cached prefix, and the
    prompt's last whole page."""

    @property
    def cached_tokens(self) -> int:
        """The length of the whole cached prefix; the engine computes the tokens after this length."""
        return self.device_tokens + self.host_tokens + self.storage_tokens
