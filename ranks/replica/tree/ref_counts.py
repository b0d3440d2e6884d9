"""Refcounts: locks and pins that keep a node's pages in place.

A lock keeps device pages. A pin keeps host pages and the node's place in the tree. Each covers one
component and an interval of positions on the path to a node. Acquiring returns a lock handle; the same
handle releases it, even if nodes of the interval were split meanwhile. There are two ways to count:

- Full attention is held from the root down to a node. A node counts the lock handles that end at it
  and its held children. Walking up stops at the first node already held (rule R15).
- For other components every node of the interval counts the handle, and a split copies the count to
  both halves.

Nodes without a value are counted, too, so that a value loaded back later is locked at once. If any
component of a node is held, the full attention of that node and its ancestors is held as well.
"""

from collections.abc import Callable
from typing import NamedTuple

from ....errors import InternalError
from .node import Node, not_held


class LockHandle(NamedTuple):
    """The handle of a lock or pin on `tier` for `component`, from `start` to the end of `node`."""

    tier: int
    component: int
    node: Node
    start: int
    end: int


class RefCounts:
    """All locks and pins, and the number of pages they keep on each tier."""

    def __init__(
        self,
        components: int,
        released: Callable[[Node, int, int], None],
        changed: dict[Node, None],
    ) -> None:
        """Set the callbacks.

        `released` is called for each node, tier and component when its last lock or pin is released.
        `changed` collects nodes at which a lock or pin has begun or ended.
        """
        self._released = released
        self._not_held = not_held(components)
        self._changed = changed
        self.kept_pages: tuple[list[int], list[int]] = ([0] * components, [0] * components)
        """By tier and component: pages of tree nodes that are locked (device) or pinned (host)."""

    def acquire(self, tier: int, component: int, node: Node, start: int = 0) -> LockHandle:
        """Lock or pin the nodes on the path to `node` that begin at or after position `start`.

        For full attention, always lock or pin the whole path.
        """
        node.ends += 1
        each = node
        if not component:
            while each.parent is not None and self._hold(each, tier, 0):
                each = each.parent
            return LockHandle(tier, component, node, 0, node.end)
        top = None
        while each.parent is not None and each.start >= start:
            top = each
            self._hold(each, tier, component)
            each = each.parent
        if top is None:
            return LockHandle(tier, component, node, node.end, node.end)
        top.begins += 1
        return LockHandle(tier, component, node, top.start, node.end)

    def extend(self, lock_handle: LockHandle, node: Node) -> LockHandle:
        """Extend a lock or pin to `node`, a descendant of its last node; visits only the added nodes.

        Returns the new lock handle, which replaces `lock_handle`.
        """
        tier, component, old = lock_handle.tier, lock_handle.component, lock_handle.node
        each: Node | None = node
        while each is not old:
            assert each is not None
            is_first = self._hold(each, tier, component)
            if not (component or is_first):
                # `each` was held before, so all nodes above it, including the old end, already count
                # their held child. Remove this handle from the count of the old end, because the handle
                # now ends further down.
                self._unlock_base(tier, old)
                break
            each = each.parent
        old.ends -= 1
        self._changed[old] = None
        node.ends += 1
        return LockHandle(tier, component, node, lock_handle.start, node.end)

    def release(self, lock_handle: LockHandle) -> None:
        """Release a lock or pin by the handle that `acquire` returned, exactly once."""
        node, tier, component = lock_handle.node, lock_handle.tier, lock_handle.component
        if node.end != lock_handle.end:
            raise InternalError(
                f"node {node.id} ends at {node.end}, its lock handle at {lock_handle.end}"
            )
        node.ends -= 1
        if not node.ends and len(node.children) == 1:
            self._changed[node] = None
        if not component:
            self._unlock_base(tier, node)
            return
        top, each, above, start = None, node, node.parent, lock_handle.start
        while above is not None and each.start >= start:
            top = each
            self._let_go(each, tier, component)
            each, above = above, above.parent
        if top is not None:
            top.begins -= 1
            self._changed[top] = None

    def _unlock_base(self, tier: int, node: Node) -> None:
        each, above = node, node.parent
        while above is not None and self._let_go(each, tier, 0):
            each, above = above, above.parent

    def _hold(self, node: Node, tier: int, component: int) -> bool:
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
