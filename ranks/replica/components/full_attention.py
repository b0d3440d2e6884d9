"""Full attention: one page of KV for every page of tokens, all of which a match needs."""

from ...orders import KV_POOL
from ..pages import PageRun


class FullAttention:
    """The component that every model has; see `Component`.

    Its pages leave a tier from the leaves up, and take with them what other components have there:
    nothing can be used without them.
    """

    name = "full_attention"
    pool = KV_POOL
    index = 0
    per_page = True
    span: int | None = None
    held_by_requests = True

    def needed_from(self, end: int) -> int:
        """Attention reads every token, so a match needs everything from the start."""
        del end
        return 0

    def pages_of(self, width: int) -> int:
        """One page for each page of tokens."""
        return width

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Each half keeps the pages of its own tokens."""
        return run[:pages], run[pages:]
