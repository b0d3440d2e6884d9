"""Chunking of a request's computation, depending on the model's kinds of state.

A chunk ends at the step's token budget, or earlier at a checkpoint, because a recurrent state can be
kept only at its current position. With sliding windows, pages are reserved per chunk. Window pages are
needed only for the window and the current chunk; a whole request would need as many as full attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ranks.protocol.config import RankCacheConfig, Recurrent, SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Decides where chunks end, when pages are reserved, and when they are published."""

    page_tokens: int
    tokens_max: int | None
    """The maximum chunk length if window pages limit it; None means no limit."""
    checkpoint_tokens: tuple[int, ...]
    """The distances of checkpoints of the model's recurrent states."""

    @classmethod
    def of(cls, config: RankCacheConfig) -> "Chunks":
        """Return the chunking for a cache configuration."""
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
        """Return the end of the prompt chunk that begins at `computed`."""
        ends = [prompt, computed + budget]
        if self.tokens_max is not None:
            ends.append(computed + self.tokens_max)
        ends.extend(each for each in checkpoints if each > computed)
        return min(ends)

    def publishes(self, computed: int) -> bool:
        """Return whether a decoding request publishes its pages at this length.

        True at checkpoints, so that the state is kept. With sliding windows also at every whole page,
        because only published pages are freed when the window has passed them.
        """
        if self.one_by_one and computed % self.page_tokens == 0:
            return True
        return any(computed % each == 0 for each in self.checkpoint_tokens)


def _chunk_pages(window: SlidingWindow, page_tokens: int) -> int:
    """Return the maximum pages of a chunk: half of the pool beyond a window and one page.

    Half, so that a second request can run at the same time. The one page is for a chunk that begins
    within a page.
    """
    window_pages = -(-window.window_tokens // page_tokens)
    return max(1, (window.device_pages - window_pages - 1) // 2)
