"""Division of a request's computation into chunks, depending on the model's kinds of state.

A chunk ends at the step's token budget, or earlier at a checkpoint, because a recurrent state can be
kept only at its current position. If the model has sliding windows, pages are reserved for one chunk at
a time. A chunk then needs window pages only for the window and for its own tokens. A whole prompt would
need as many window pages as full-attention pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ranks.protocol.config import RankCacheConfig, Recurrent, SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Decides where chunks end, when pages are reserved, and when pages are inserted into the cache."""

    page_tokens: int
    tokens_max: int | None
    """Maximum length of a chunk in tokens, so that the window pools have room; None means no limit."""
    checkpoint_tokens: tuple[int, ...]
    """The checkpoint distance in tokens of each recurrent state of the model."""

    @classmethod
    def of(cls, config: RankCacheConfig) -> "Chunks":
        """Return the chunking rules for a cache configuration."""
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
        """Whether pages are reserved for each chunk instead of the whole request."""
        return self.tokens_max is not None

    def whole_pages(self, tokens: int) -> int:
        """Return `tokens` rounded up to whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def end(self, computed: int, prompt: int, budget: int, checkpoints: Sequence[int]) -> int:
        """Return the end of a prompt's chunk from `computed`, by budget, checkpoints and windows."""
        ends = [prompt, computed + budget]
        if self.tokens_max is not None:
            ends.append(computed + self.tokens_max)
        ends.extend(each for each in checkpoints if each > computed)
        return min(ends)

    def publishes(self, computed: int) -> bool:
        """Return whether a decoding request inserts its pages once it has `computed` tokens.

        True at checkpoints, so that the state is kept. If the model has sliding windows, true also at
        every whole page, because pages left of a window are freed only after they were inserted.
        """
        if self.one_by_one and computed % self.page_tokens == 0:
            return True
        return any(computed % each == 0 for each in self.checkpoint_tokens)


def _chunk_pages(window: SlidingWindow, page_tokens: int) -> int:
    """Return how many pages a chunk may have so that the window pool has room for two requests.

    The window pool must also hold the pages of one window, and one page because a chunk may begin
    within a page. Half of the other pages are for the chunk, and half for a second request.
    """
    window_pages = -(-window.window_tokens // page_tokens)
    return max(1, (window.device_pages - window_pages - 1) // 2)
