"""Return values of the replica's admission and drop commands."""

from enum import StrEnum
from typing import NamedTuple


class Wait(StrEnum):
    """The reason why a request was not admitted. The request holds no pages; retry at a later step."""

    NO_ROOM = "no_room"
    """Too few device pages are free or evictable. Retry after other requests have released pages."""
    LOADING = "loading"
    """Another request is already loading back pages that this request needs."""
    LOST = "lost"
    """Pages of the retracted request were evicted. Call `load_back` and recompute the missing tokens.
    """


class Dropped(NamedTuple):
    """The result of `drop`: how many full-attention pages it removed, and how many stay.

    Device pages and host pages are added up.
    """

    pages: int
    held: int
    """Number of pages that `drop` could not remove, because requests or operations still hold them.
    Call `drop` again after those have finished."""


class Admission(NamedTuple):
    """The number of tokens of an admitted request's cached prefix that come from each tier."""

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
    recurrent state is kept there. These are the multiples of `checkpoint_tokens`, the end of the cached
    prefix, and the end of the prompt's last whole page."""

    @property
    def cached_tokens(self) -> int:
        """The length of the whole cached prefix; the engine computes the tokens after this length."""
        return self.device_tokens + self.host_tokens + self.storage_tokens
