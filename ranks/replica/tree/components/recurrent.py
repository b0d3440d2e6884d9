"""A recurrent state: one slot that stands for a whole prefix, and exists at checkpoints only.

A match needs the state exactly at its end. A request computes in a slot of its own, which a
checkpoint is copied to when the request continues from it, and from which one is copied when it is
published: so what the tree has is never written again.
"""

from ...core.pages import PageRun


class RecurrentComponent:
    """The component of layers with a recurrent state; see `Component`."""

    name = "recurrent"
    per_page = False
    span = 1
    held_by_requests = False

    def __init__(self, index: int, pool: str, checkpoint_pages: int) -> None:
        self.index = index
        self.pool = pool
        self.checkpoint_pages = checkpoint_pages
        """A checkpoint is kept at every multiple of this."""

    def needed_from(self, end: int) -> int:
        """Return the last position: the state of a node lies at its end."""
        return max(0, end - self.span)

    def pages_of(self, width: int) -> int:
        """One slot, however long the run is."""
        del width
        return 1

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """The lower half keeps the state, which stands for its end."""
        del pages
        return None, run
