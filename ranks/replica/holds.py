"""Locks and pins: what keeps a node's pages where they are, and for whom.

A lock keeps device pages, a pin keeps host pages and the node's place in the tree. Both are counted
for each component on every node of an interval of positions on the path to a node. Whoever acquires
one gets a receipt and gives it back with that receipt: the interval stays right when nodes of it are
split, since a split gives both halves the counts of the whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import InternalError
from .tree import Node


@dataclass(frozen=True, slots=True)
class Receipt:
    """A lock or pin that is held: on `tier`, for `component`, from `start` to the end of `node`."""

    tier: int
    component: int
    node: Node
    start: int
    end: int


class Holds:
    """All locks and pins, and how many pages they keep on each tier."""

    def __init__(self, changed: Callable[[Node], None]) -> None:
        self._changed = changed
        self.kept_pages = [0, 0]
        """By tier: pages of nodes in the tree that are locked (device) or pinned (host)."""

    def acquire(self, tier: int, component: int, node: Node, start: int = 0) -> Receipt:
        """Lock or pin the path to `node` from position `start`, which is a node's start."""
        for each in _interval(node, start):
            if not each.holds(tier):
                self._count(each, tier, 1)
            each.held[tier][component] += 1
        return Receipt(tier, component, node, start, node.end)

    def release(self, receipt: Receipt) -> None:
        """Give back what `acquire` returned, exactly once."""
        node, tier = receipt.node, receipt.tier
        if node.end != receipt.end:
            raise InternalError(f"node {node.id} ends at {node.end}, its receipt at {receipt.end}")
        for each in _interval(node, receipt.start):
            each.held[tier][receipt.component] -= 1
            if each.held[tier][receipt.component] < 0:
                raise InternalError(f"node {each.id} was released more often than it was held")
            if not each.holds(tier):
                self._count(each, tier, -1)
            self._changed(each)

    def value_changed(self, node: Node, tier: int, pages: int) -> None:
        """Account for `pages` that came to (or, negative, left) a node which may be held."""
        if node.holds(tier):
            self.kept_pages[tier] += pages

    def _count(self, node: Node, tier: int, sign: int) -> None:
        if node.pages(tier) is not None:
            self.kept_pages[tier] += sign * node.width


def _interval(node: Node, start: int) -> Iterator[Node]:
    for each in node.path():
        if each.start < start:
            return
        yield each
