"""Which page leaves a full pool first: the order of eviction on one tier.

A queue holds an entry for each node that can be evicted, ordered by recency in the replica's logical
clock. Entries are corrected when they come to the front, so that using a node costs nothing here,
and the cost of an eviction does not grow with the tree.
"""

import heapq
from collections.abc import Callable

from .tree import Node


class LeastRecentlyUsed:
    """The nodes that may be evicted on one tier, least recently used first."""

    def __init__(self, tier: int, evictable: Callable[[Node], bool]) -> None:
        self._tier = tier
        self._evictable = evictable
        self._heap: list[tuple[int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Enter `node` if it can be evicted and has no entry yet."""
        if not node.queued[self._tier] and self._evictable(node):
            node.queued[self._tier] = True
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def next_victim(self) -> Node | None:
        """Remove and return the node that was used longest ago, or None if none can be evicted."""
        while self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued[self._tier] = False
            if not self._evictable(node):
                continue
            if node.last_access == stamp:
                return node
            self.offer(node)
        return None

    def entries(self) -> list[Node]:
        """Return the nodes that have an entry, in no particular order."""
        return [node for _, _, node in self._heap]
