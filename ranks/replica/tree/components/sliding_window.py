"""A sliding window: KV of which only the last tokens before a position are ever read.

A match needs the whole trailing window before its end, and nothing of what lies before that. So a
value that has left is a gap, behind which the count begins anew, and pages that no request's window
reaches may leave in any order, those nearest to the root first.
"""

from .base import PerPage


class SlidingWindowComponent(PerPage):
    """The component of layers that attend to the last tokens only; see `Component`."""

    name = "sliding_window"
    held_by_requests = True

    def __init__(self, index: int, pool: str, window_pages: int) -> None:
        self.index = index
        self.pool = pool
        self.span = window_pages

    def needed_from(self, end: int) -> int:
        """Return where the trailing window begins."""
        return max(0, end - self.span)
