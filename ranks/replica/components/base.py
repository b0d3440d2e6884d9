"""What the tree asks of a component.

A component is one kind of state that a model keeps for a prefix: the KV of its full-attention
layers, of its sliding-window layers, or a recurrent state. Each has a pool on each tier, and on each
node of the tree a value on each tier or a tombstone. The replica knows components by this interface
and by their index in the node's value lists.
"""

from typing import Protocol

from ..pages import PageRun


class Valued(Protocol):
    """What a component may see of a node."""

    def pages(self, tier: int, component: int = 0) -> PageRun | None:
        """Return the pages of one component on one tier, or None."""
        ...

    @property
    def end(self) -> int:
        """The position after the node's last page."""
        ...


class Component(Protocol):
    """One kind of per-prefix state."""

    name: str
    pool: str
    """The name of its pool on either tier."""
    index: int
    """Its place in a node's value lists."""

    def may_end(self, node: Valued, tiers: tuple[int, ...]) -> bool:
        """Say whether a match may end at `node`, whose ancestors were all asked before it."""
        ...

    def needed_from(self, end: int) -> int:
        """Return the first position that a match ending at `end` needs; it is locked from there."""
        ...

    def split(self, run: PageRun, pages: int) -> tuple[PageRun | None, PageRun | None]:
        """Divide a node's value where its run is cut after `pages` pages."""
        ...
