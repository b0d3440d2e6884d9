"""The eviction queue of one component on one tier.

Nodes are ordered by the policy's grade and, within a grade, by last use in the logical clock. Nearly
every node enters as the most recently used one. Each grade therefore has a line (ordered dict): a
node enters it, or moves to its end when used, in O(1). A node with an older last use, such as a node
that became a leaf long after it was used, waits in a heap. The cost of an eviction does not grow with
the tree.
"""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from ...protocol.eviction_policies import EvictionPolicy, Graded

NodeT = TypeVar("NodeT", bound=Graded)


class _Line(Generic[NodeT]):
    """The nodes of one grade (eviction class) that entered in the order of their last uses."""

    __slots__ = ("grade", "newest", "nodes")

    def __init__(self, grade: int) -> None:
        self.grade = grade
        self.newest = 0
        """The last use (logical time) of the node that entered last, even if that node has left."""
        self.nodes: OrderedDict[NodeT, int] = OrderedDict()
        """The nodes with their order of entry, which breaks ties between equal last uses."""

    def __lt__(self, other: "_Line[NodeT]") -> bool:
        return self.grade < other.grade


_Late: TypeAlias = tuple[int, int, int, NodeT]
"""Heap entry of a node that entered the queue with an older last use than the newest node of its grade.
The fields are grade, last use, order of entry, and node."""

STALE_SPARE = 64
"""The heap is compacted when it has more than this number of stale entries, plus one for every four
valid ones."""


class EvictionQueue(Generic[NodeT]):
    """The nodes that may be evicted, in exact order of grade and last use.

    Callers that change `last_access`, `hits` or `priority` of a node must call `used`. Of nodes with
    equal grade and last use, the one that entered or was used first is evicted first.
    """

    def __init__(self, policy: EvictionPolicy, evictable: Callable[[NodeT], bool]) -> None:
        self._grade = policy.grade
        self._evictable = evictable
        self._entered: dict[NodeT, _Line[NodeT] | _Late[NodeT]] = {}
        """By node: the line (nodes of one grade by last use) that contains it, or its entry in the
        heap."""
        self._line_of: dict[int, _Line[NodeT]] = {}
        self._lines: list[_Line[NodeT]] = []
        self._late: list[_Late[NodeT]] = []
        """Heap of the nodes that entered the queue with an older last use than the newest node of their
        grade. An entry is stale unless `_entered` refers to it."""
        self._late_count = 0
        """The number of heap entries that are not stale."""
        self._entries_made = 0

    def __contains__(self, node: NodeT) -> bool:
        """Return whether the node is in the queue, even if it cannot be evicted now."""
        return node in self._entered

    def try_enter(self, node: NodeT) -> None:
        """Add `node` to the queue if it can be evicted and is not in the queue yet."""
        if node not in self._entered and self._evictable(node):
            self.enter(node)

    def enter(self, node: NodeT) -> None:
        """Add a node that can be evicted and is not in the queue yet."""
        grade, stamp = self._grade(node), node.last_access
        line = self._line_of.get(grade)
        if line is None:
            line = self._line_of[grade] = _Line(grade)
            insort(self._lines, line)
        self._entries_made = order = self._entries_made + 1
        if stamp >= line.newest or not line.nodes:
            line.newest = stamp
            line.nodes[node] = order
            self._entered[node] = line
        else:
            late = (grade, stamp, order, node)
            heapq.heappush(self._late, late)
            self._late_count += 1
            self._entered[node] = late

    def used(self, node: NodeT) -> None:
        """Move a node, if queued, to its new position after its last use, hits or priority changed."""
        entry = self._entered.get(node)
        if entry is None:
            return
        grade = self._grade(node)
        if isinstance(entry, _Line) and entry.grade == grade and node.last_access >= entry.newest:
            # The usual case: move the used node to the end of its line.
            entry.newest = node.last_access
            self._entries_made += 1
            entry.nodes[node] = self._entries_made
            entry.nodes.move_to_end(node)
            return
        self._leave(node, entry)
        self.enter(node)

    def discard(self, node: NodeT) -> None:
        """Remove a node from the queue, if present, because the node's pages have left the tier."""
        entry = self._entered.get(node)
        if entry is None:
            return
        if isinstance(entry, _Line):
            del self._entered[node]
            del entry.nodes[node]
        else:
            self._leave(node, entry)

    def next_victim(self) -> NodeT | None:
        """Remove and return the first node that can be evicted, or None if there is none.

        Also removes the nodes in front of it that cannot be evicted now.
        """
        evictable, entered = self._evictable, self._entered
        while not self._late and self._lines and self._lines[0].nodes:
            # The usual case: the heap of nodes that were queued out of order is empty. Then the least
            # recently used node of the lowest grade is evicted.
            node, _ = self._lines[0].nodes.popitem(last=False)
            del entered[node]
            if evictable(node):
                return node
        while (late := self._pop()) is not None:
            if evictable(late):
                return late
        return None

    def entries(self) -> list[NodeT]:
        """Return the nodes in the queue, in an order that is equal on every rank."""
        return list(self._entered)

    def _leave(self, node: NodeT, entry: _Line[NodeT] | _Late[NodeT]) -> None:
        del self._entered[node]
        if isinstance(entry, _Line):
            del entry.nodes[node]
            return
        self._late_count -= 1
        if len(self._late) > self._late_count * 5 // 4 + STALE_SPARE:
            self._late = [each for each in self._late if self._entered.get(each[3]) is each]
            heapq.heapify(self._late)
        # Drop stale entries at the front of the heap at once, because most nodes leave from there.
        self._drop_stale()

    def _drop_stale(self) -> None:
        late, entered = self._late, self._entered
        while late and entered.get(late[0][3]) is not late[0]:
            heapq.heappop(late)

    def _pop(self) -> NodeT | None:
        lines = self._lines
        while lines and not lines[0].nodes:
            del self._line_of[lines.pop(0).grade]
        if self._late:
            self._drop_stale()
            if self._late and self._late_is_first(self._late[0]):
                self._late_count -= 1
                node = heapq.heappop(self._late)[3]
                del self._entered[node]
                return node
        if not lines:
            return None
        node, _ = lines[0].nodes.popitem(last=False)
        del self._entered[node]
        return node

    def _late_is_first(self, late: _Late[NodeT]) -> bool:
        if not self._lines:
            return True
        line = self._lines[0]
        head = next(iter(line.nodes))
        return late[:3] < (line.grade, head.last_access, line.nodes[head])
