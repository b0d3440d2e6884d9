"""The interface of a component to the replica.

A component is one kind of state that a model keeps for a prefix: the KV of its full-attention
layers, of its sliding-window layers, or a recurrent state. Each has a pool on each tier, and on each
node of the tree a value on each tier or a tombstone. The replica knows components by this interface
and by their index in the node's value lists; full attention is the first.

A match may end at a position if each component has all that it needs there: a value, on the device or
on the host, for every position from `needed_from` of the end up to it. That is the whole validator;
restorable sets, locks, backups and what a prefetch brings all follow from it.
"""

from typing import Protocol

from ...core.pages import PageRun


class Component(Protocol):
    """One kind of per-prefix state. Lengths and positions are in pages of tokens."""

    name: str
    pool: str
    """The name of its pool on either tier."""
    index: int
    """Its place in a node's value lists."""
    per_page: bool
    """Whether a value has one page for each page of tokens, or one in all, for the node's end."""
    held_by_requests: bool
    """Whether a request uses the tree's device pages while it computes."""

    @property
    def span(self) -> int | None:
        """How many positions before its end a match needs; None stands for all."""
        ...

    def needed_from(self, end: int) -> int:
        """Return the first position that a match ending at `end` needs."""
        ...

    def pages_of(self, width: int) -> int:
        """Return how many pages of the pool a value of a node of `width` pages has."""
        ...

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Divide a node's value where its run is cut after `pages` pages."""
        ...


class PerPage:
    """The common part of components that keep one page for each page of tokens."""

    per_page = True

    def pages_of(self, width: int) -> int:
        """One page for each page of tokens."""
        return width

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Each half keeps the pages of its own tokens."""
        return run[:pages], run[pages:]
