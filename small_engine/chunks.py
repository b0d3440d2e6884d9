"""How a request is computed piece by piece, by what the model keeps.

A chunk ends where the step's budget does, and earlier at a checkpoint, since a recurrent state can
be kept only where it stands. A model with windows needs window pages for the window and for the
chunk in progress only; reserving the whole request at once would take as many as full attention
does, so its requests reserve chunk by chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ranks.protocol.config import RankCacheConfig, Recurrent, SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Says where chunks end, when pages are reserved, and when they are published."""

    page_tokens: int
    tokens_max: int | None
    """The length of a chunk, where window pages bound it; None stands for no bound."""
    checkpoint_tokens: tuple[int, ...]
    """The distances of checkpoints of the model's recurrent states."""

    @classmethod
    def of(cls, config: RankCacheConfig) -> "Chunks":
        """Return how requests are computed with such a cache."""
        page_tokens = config.layout.page_tokens
        rooms = [
            _chunk_pages(each, page_tokens)
            for each in config.components
            if isinstance(each, SlidingWindow)
        ]
        return cls(
            page_tokens=page_tokens,
            tokens_max=min(rooms) * page_tokens if rooms else None,
            checkpoint_tokens=tuple(
                each.checkpoint_tokens for each in config.components if isinstance(each, Recurrent)
            ),
        )

    @property
    def one_by_one(self) -> bool:
        """Says whether pages are reserved for each chunk and not for the whole request."""
        return self.tokens_max is not None

    def whole_pages(self, tokens: int) -> int:
        """Return the tokens that the pages for `tokens` tokens have room for."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def end(self, computed: int, prompt: int, budget: int, checkpoints: Sequence[int]) -> int:
        """Return where the chunk of a prompt that begins at `computed` ends."""
        ends = [prompt, computed + budget]
        if self.tokens_max is not None:
            ends.append(computed + self.tokens_max)
        ends.extend(each for each in checkpoints if each > computed)
        return min(ends)

    def publishes(self, computed: int) -> bool:
        """Say whether a request that decodes publishes its pages at this length.

        At checkpoints, so that they are kept; and with windows at every whole page, since only what
        is published leaves the request when its window has passed.
        """
        if self.one_by_one and computed % self.page_tokens == 0:
            return True
        return any(computed % each == 0 for each in self.checkpoint_tokens)


def _chunk_pages(window: SlidingWindow, page_tokens: int) -> int:
    """Return how many pages a chunk may have: at most half of what a window leaves of the pool.

    Half, so that a second request can go on beside it. One page is for a chunk that begins inside of
    a page.
    """
    window_pages = -(-window.window_tokens // page_tokens)
    return max(1, (window.device_pages - window_pages - 1) // 2)
