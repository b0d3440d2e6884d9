"""Locks and pins: what keeps a node's pages where they are, and for whom.

A lock keeps device pages, a pin keeps host pages and the node's place in the tree. Both are of one
component, and of an interval of positions on the path to a node. Whoever acquires one gets a receipt
and gives it back with that receipt, also when nodes of the interval were split. There are two ways of
counting:

- Full attention is held from the root down to a node, which may be a long way. A node counts how many
  receipts end with it, and how many of its children are held: what was held before ends the way up
  (rule R15).
- Of the other components every node of the interval counts the receipt, and a split gives both halves
  what the whole had.

A node of the interval that has no value is counted as well: what a load back brings there is locked
from the moment it comes. Whoever holds one component holds full attention at least as far.
"""

from collections.abc import Callable
from typing import NamedTuple

from ....errors import InternalError
from .node import Node, not_held


class Receipt(NamedTuple):
    """A lock or pin that is held: on `tier`, for `component`, from `start` to the end of `node`."""

    tier: int
    component: int
    node: Node
    start: int
    end: int


class Holds:
    """All locks and pins, and how many pages they keep on each tier."""

    def __init__(
        self,
        components: int,
        released: Callable[[Node, int, int], None],
        changed: dict[Node, None],
    ) -> None:
        """`released` is told of each node, tier and component that nothing holds any more.

        `changed` gets the nodes at which something held has ended or begun.
        """
        self._released = released
        self._not_held = not_held(components)
        self._changed = changed
        self.kept_pages: tuple[list[int], list[int]] = ([0] * components, [0] * components)
        """By tier and component: pages of nodes in the tree that are locked (device) or pinned."""

    def acquire(self, tier: int, component: int, node: Node, start: int = 0) -> Receipt:
        """Lock or pin what of the path to `node` begins at position `start` or behind it.

        Of full attention that is all of it.
        """
        node.ends += 1
        each = node
        if not component:
            while each.parent is not None and self._hold(each, tier, 0):
                each = each.parent
            return Receipt(tier, component, node, 0, node.end)
        top = None
        while each.parent is not None and each.start >= start:
            top = each
            self._hold(each, tier, component)
            each = each.parent
        if top is None:
            return Receipt(tier, component, node, node.end, node.end)
        top.begins += 1
        return Receipt(tier, component, node, top.start, node.end)

    def extend(self, receipt: Receipt, node: Node) -> Receipt:
        """Let what `receipt` holds go on down to `node`, which lies below it; costs what is new.

        Its own receipt is returned, and takes the place of the one that is given.
        """
        tier, component, old = receipt.tier, receipt.component, receipt.node
        each: Node | None = node
        while each is not old:
            assert each is not None
            is_first = self._hold(each, tier, component)
            if not (component or is_first):
                # What was held here counts at the old end already, as a child that is held.
                self._let_base_go(tier, old)
                break
            each = each.parent
        old.ends -= 1
        self._changed[old] = None
        node.ends += 1
        return Receipt(tier, component, node, receipt.start, node.end)

    def release(self, receipt: Receipt) -> None:
        """Give back what `acquire` returned, exactly once."""
        node, tier, component = receipt.node, receipt.tier, receipt.component
        if node.end != receipt.end:
            raise InternalError(f"node {node.id} ends at {node.end}, its receipt at {receipt.end}")
        node.ends -= 1
        if not node.ends and len(node.children) == 1:
            self._changed[node] = None
        if not component:
            self._let_base_go(tier, node)
            return
        top, each, above, start = None, node, node.parent, receipt.start
        while above is not None and each.start >= start:
            top = each
            self._let_go(each, tier, component)
            each, above = above, above.parent
        if top is not None:
            top.begins -= 1
            self._changed[top] = None

    def _let_base_go(self, tier: int, node: Node) -> None:
        each, above = node, node.parent
        while above is not None and self._let_go(each, tier, 0):
            each, above = above, above.parent

    def _hold(self, node: Node, tier: int, component: int) -> bool:
        """Count one hold more of a node; say whether it is the first."""
        if not node.hold_count:
            device, host = node.held
            node.held = [*device], [*host]
        node.hold_count += 1
        counts = node.held[tier]
        counts[component] = held = counts[component] + 1
        if held > 1:
            return False
        run = node.values[tier][component]
        if run is not None:
            self.kept_pages[tier][component] += len(run)
        return True

    def _let_go(self, node: Node, tier: int, component: int) -> bool:
        """Count one hold less of a node; say whether it was the last."""
        counts = node.held[tier]
        left = counts[component] - 1
        if left < 0:
            raise InternalError(f"node {node.id} was released more often than it was held")
        counts[component] = left
        node.hold_count = in_all = node.hold_count - 1
        if not in_all:
            node.held = self._not_held
        if left:
            return False
        run = node.values[tier][component]
        if run is not None:
            self.kept_pages[tier][component] -= len(run)
        self._released(node, tier, component)
        return True
