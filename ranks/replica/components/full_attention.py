"""Full attention: one page of KV for every page of tokens, all of which a match needs."""

from ...orders import KV_POOL
from ..pages import PageRun
from .base import Valued


class FullAttention:
    """The component that every model has; see `Component`."""

    name = "full_attention"
    pool = KV_POOL
    index = 0

    def may_end(self, node: Valued, tiers: tuple[int, ...]) -> bool:
        """A match may end wherever the pages are there; the walk has seen all before them."""
        return any(node.pages(tier, self.index) is not None for tier in tiers)

    def needed_from(self, end: int) -> int:
        """Attention reads every token, so a match needs everything from the start."""
        del end
        return 0

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Each half keeps the pages of its own tokens."""
        return run[:pages], run[pages:]
