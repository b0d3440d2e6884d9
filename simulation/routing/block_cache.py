"""A group's cache in device memory: what a replica keeps and evicts, at a thousandth of its cost.

Least recently used first, from the end of a prefix towards its beginning. For a group that computes one
prompt after the other, with nothing below the device, this is exactly what a replica does;
`tests/simulation/routing/test_block_cache.py` holds it against one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...ranks.orders import KV_POOL
from ...ranks.replica.notices import Cause, Notice, Removed, Stored, Tier


@dataclass(frozen=True, slots=True)
class PagedPrompt:
    """A prompt as a cache sees it."""

    tokens: int
    page_tokens: int
    keys: tuple[bytes, ...]
    """The keys of its whole pages."""

    @property
    def pages(self) -> int:
        """How many pages it needs, the last of which may not be full."""
        return -(-self.tokens // self.page_tokens)

    @property
    def usable_pages(self) -> int:
        """How many of its pages can come from a cache: at least one token is computed."""
        return (self.tokens - 1) // self.page_tokens


class BlockCache:
    """The pages of one group, in the order in which they would leave."""

    def __init__(self, device_pages: int) -> None:
        self.device_pages = device_pages
        self._pages: dict[bytes, None] = {}
        """A dictionary keeps the order of insertion; what was used goes to its end."""

    def __len__(self) -> int:
        """Return how many pages are cached."""
        return len(self._pages)

    def keys(self) -> frozenset[bytes]:
        """Return the keys of all that is cached."""
        return frozenset(self._pages)

    def match(self, prompt: PagedPrompt) -> int:
        """Return how many pages of a prompt are cached and usable. Changes nothing."""
        pages = self._pages
        hit = 0
        for key in prompt.keys[: prompt.usable_pages]:
            if key not in pages:
                break
            hit += 1
        return hit

    def admit(self, prompt: PagedPrompt) -> tuple[int, list[Notice]]:
        """Make room for a prompt that is now to be computed; return how many pages of it are cached."""
        hit = self.match(prompt)
        self._use(prompt.keys[:hit])
        surplus = len(self._pages) + prompt.pages - hit - self.device_pages
        if surplus <= 0:
            return hit, []
        leaving = tuple(key for key, _ in zip(self._pages, range(surplus), strict=False))
        for key in leaving:
            del self._pages[key]
        return hit, [Removed(Tier.DEVICE, KV_POOL, len(leaving), Cause.ROOM, leaving)]

    def insert(self, prompt: PagedPrompt) -> list[Notice]:
        """Publish the whole pages of a prompt that has been computed."""
        known = 0
        for key in prompt.keys:
            if key not in self._pages:
                break
            known += 1
        new = prompt.keys[known:]
        self._use(prompt.keys)
        if not new:
            return []
        after = prompt.keys[known - 1] if known else b""
        return [Stored(Tier.DEVICE, KV_POOL, len(new), Cause.COMPUTED, after, new)]

    def _use(self, keys: Sequence[bytes]) -> None:
        """Count pages as used now; of a prefix the last page is the first to leave."""
        for key in reversed(keys):
            self._pages.pop(key, None)
            self._pages[key] = None
