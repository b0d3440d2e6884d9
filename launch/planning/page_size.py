"""Which page size to take, and why.

A store has a fixed cost for each object, so small ones are slow: of what the hardware reads, `file://`
reaches about half with objects of 64 KiB, and most of it with 1 MiB (docs/performance.md). But a prefix
is cached in whole pages, so half a page of each prompt is computed again on the mean, and what two
prompts share beyond their last common page is kept twice.
"""

from typing import Final, NamedTuple

from ...page_format.object_header import HEADER_BYTES
from ...ranks.protocol.orders import KV_POOL
from ...small_engine.profile import Profile
from .pools import ModelPools

PAGE_SIZES: Final = (16, 32, 64, 128, 256)
OBJECT_BYTES_GOOD: Final = 1 << 20


class PageSize(NamedTuple):
    """One page size."""

    page_tokens: int
    object_bytes: int
    """An object of full attention, of one rank, without its header."""
    header_share: float
    waste_tokens: int
    """Tokens of each prompt that are computed again on the mean."""


def page_sizes(profile: Profile, tp: int) -> list[PageSize]:
    """Return what each page size comes to."""
    sizes: list[PageSize] = []
    for tokens in PAGE_SIZES:
        nbytes = ModelPools(profile, tp, tokens).page_bytes[KV_POOL]
        sizes.append(PageSize(tokens, nbytes, HEADER_BYTES / (HEADER_BYTES + nbytes), tokens // 2))
    return sizes


def advised(sizes: list[PageSize]) -> PageSize:
    """Return the smallest page whose objects are read well, or the largest of all."""
    return next((each for each in sizes if each.object_bytes >= OBJECT_BYTES_GOOD), sizes[-1])
