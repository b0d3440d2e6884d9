"""The prefix tree: a radix tree over runs of whole pages.

A node holds a run of one or more pages: their tokens as bytes, and for each component the pages that
hold their content on each tier. Children are found by the bytes of their first page, and a run is
matched by one comparison of bytes. A split keeps the given node as the lower half, so that whoever
refers to a node refers to the end of its run, before and after.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ...errors import InternalError
from .components.base import Component
from .page_keys import page_keys
from .pages import PageRun
from .tokens import TOKEN_BYTES

DEVICE, HOST = 0, 1
"""The tiers that the tree knows, as indices."""


class Place(NamedTuple):
    """Which of the trees a prefix is in."""

    namespace: str
    """Keeps apart what must not be shared: a tenant's salt, an adapter, or both."""
    generation: int = 0
    """How often the cache had been reset when the tree began."""
    weights_version: str | None = None
    """What that reset named; None if it named none, and before the first one."""

    @property
    def outlives(self) -> bool:
        """Whether another life of the cache can find what storage has of it."""
        return not self.generation or self.weights_version is not None


@cache
def _not_held(components: int) -> tuple[list[int], list[int]]:
    """Return the counts of all nodes that nothing holds, which is nearly every node."""
    return [0] * components, [0] * components


_CHILDLESS: "dict[bytes, Node]" = {}
"""The children of all nodes that have none."""


class Node:
    """A run of pages; see the module. Lengths and positions are in pages.

    Most nodes are leaves that nothing holds: what they have nothing in, they share.
    """

    __slots__ = (
        "children",
        "end",
        "first",
        "held",
        "hits",
        "hold_count",
        "id",
        "keys",
        "last_access",
        "marks",
        "occupied_children",
        "parent",
        "persisted",
        "place",
        "priority",
        "saved_at",
        "start",
        "store",
        "there",
        "tokens",
        "used_ms",
        "values",
        "width",
    )

    def __init__(
        self, number: int, parent: "Node | None", tokens: bytes, width: int, components: int
    ) -> None:
        self.id = number
        self.parent = parent
        self.tokens = tokens
        self.first = b""
        """The tokens of its first page, by which its parent finds it."""
        self.width = width
        self.start: int = parent.end if parent is not None else 0
        self.end: int = self.start + width
        """The position after its last page, for good: a split keeps it as the lower half."""
        self.children = _CHILDLESS
        self.values: tuple[list[PageRun | None], list[PageRun | None]] = (
            [None] * components,
            [None] * components,
        )
        """By tier and component: the pages that hold the content, or None (a tombstone)."""
        self.held = _not_held(components)
        """By tier and component: device locks and host pins. `hold` and `let_go` change them."""
        self.hold_count = 0
        """Their sum."""
        self.there = 0
        """Which of the values are there: the bit `tier * components + component` of each."""
        self.occupied_children = [0, 0]
        """By tier: how many children have full-attention pages there."""
        self.last_access = 0
        """When it was last used, in the replica's logical clock."""
        self.hits = 0
        """How many requests have found it cached."""
        self.priority = 0
        """The highest priority of the requests that used it."""
        self.keys: list[bytes] | None = None
        self.saved_at = -1
        """Its last use when, under write-back, it was backed up to leave the device."""
        self.persisted: frozenset[int] = frozenset()
        """The components whose pages the store `store` has on every rank, as far as is known."""
        self.place: Place = parent.place if parent is not None else Place("")
        """Which tree it is in."""
        self.used_ms = 0
        """When it was last used, in agreed time; 0 while none has been agreed on."""
        self.store = 0
        """The number of the last store that it was read from or offered to."""
        self.marks: frozenset[int] = frozenset()
        """Operations in flight that read or fill pages of this node."""

    def pages(self, tier: int, component: int = 0) -> PageRun | None:
        """Return the pages of one component on one tier, or None."""
        return self.values[tier][component]

    def has(self, component: int) -> bool:
        """Say whether some tier has the pages of one component."""
        return self.values[0][component] is not None or self.values[1][component] is not None

    def holds(self, tier: int) -> int:
        """Return how often the node is locked (device) or pinned (host), over all components."""
        return sum(self.held[tier])

    def is_held_on(self, tier: int) -> bool:
        """Say whether anything locks (device) or pins (host) the node."""
        return any(self.held[tier])

    def hold(self, tier: int, component: int) -> int:
        """Count one lock or pin more, and return how many there are of it."""
        if not self.hold_count:
            self.held = [0] * len(self.held[DEVICE]), [0] * len(self.held[HOST])
        self.hold_count += 1
        counts = self.held[tier]
        counts[component] += 1
        return counts[component]

    def let_go(self, tier: int, component: int) -> int:
        """Count one lock or pin less, and return how many are left of it."""
        counts = self.held[tier]
        left = counts[component] - 1
        if left < 0:
            raise InternalError(f"node {self.id} was released more often than it was held")
        counts[component] = left
        self.hold_count -= 1
        if not self.hold_count:
            self.held = _not_held(len(counts))
        return left

    def path(self) -> Iterator["Node"]:
        """Yield this node and its ancestors below the root, deepest first."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_down(self) -> "list[Node]":
        """Return the same, from the top down to this node."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


COPIED_BYTES = 64 << 10
"""Up to so many bytes of tokens are copied for a walk."""


class Walk(NamedTuple):
    """How far a token run is in the tree: whole nodes, then some pages of one more."""

    root: Node
    nodes: list[Node]
    partial: Node | None
    """A child of the last node whose first `partial_pages` pages match."""
    partial_pages: int

    @property
    def last(self) -> Node:
        """The last node that matches whole, or the root."""
        return self.nodes[-1] if self.nodes else self.root


class Tree:
    """One radix tree for each place, under a root of its own."""

    def __init__(self, page_tokens: int, components: Sequence[Component]) -> None:
        self.page_tokens = page_tokens
        self.components = tuple(components)
        self.page_bytes = page_tokens * TOKEN_BYTES
        """The bytes of one page's token ids."""
        self.roots: dict[Place, Node] = {}
        self.node_count = 0
        self._next_id = 1

    def plant(self, place: Place, seed: bytes) -> Node:
        """Make the root of a place that has none, and return it."""
        root = Node(self._new_id(), None, b"", 0, len(self.components))
        root.keys = [seed]
        root.place = place
        self.roots[place] = root
        return root

    def whole_pages(self, tokens: bytes) -> int:
        """Return how many whole pages `tokens` fill."""
        return len(tokens) // self.page_bytes

    def walk(self, root: Node, tokens: bytes | memoryview) -> Walk:
        """Follow the whole pages of `tokens` down from `root`. Does not change anything."""
        return Walk(root, *self.follow(root, tokens))

    def follow(self, root: Node, tokens: bytes | memoryview) -> tuple[list[Node], Node | None, int]:
        """Return the nodes that match whole, a child that matches in part, and how many pages of it.

        As `walk`, for whoever is in a hurry.
        """
        step = self.page_bytes
        children = root.children
        if bytes(tokens[:step]) not in children:
            return [], None, 0
        view = memoryview(tokens)
        stop = len(view) - len(view) % step
        at = 0
        nodes: list[Node] = []
        if stop <= COPIED_BYTES:
            # So little is cheaper to copy once than to look at through a view for each node.
            data = view.tobytes()
            while at < stop:
                child = children.get(data[at : at + step])
                if child is None or not data.startswith(child.tokens, at):
                    break
                nodes.append(child)
                at += len(child.tokens)
                children = child.children
        while at < stop:
            child = children.get(view[at : at + step].tobytes())
            if child is None:
                break
            run = child.tokens
            end = at + len(run)
            # One comparison in place, of the whole run or of what is left of the tokens.
            if end > stop or not run.startswith(view[at:end]):
                pages = _common_pages(run, view[at : min(end, stop)], step)
                return nodes, child, pages
            nodes.append(child)
            at = end
            children = child.children
        return nodes, None, 0

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Hang a new node with a run of whole pages under `parent`, which has no such child."""
        step = self.page_bytes
        node = Node(self._new_id(), parent, tokens, len(tokens) // step, len(self.components))
        self._hang(node, parent, tokens[:step])
        self.node_count += 1
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut the first `pages` pages off `node` into a new parent of it, which is returned."""
        parent = node.parent
        if parent is None or not 0 < pages < node.width:
            raise InternalError(f"node {node.id} of {node.width} pages cannot be cut at {pages}")
        cut = pages * self.page_bytes
        upper = Node(self._new_id(), parent, node.tokens[:cut], pages, len(self.components))
        upper.first = node.first
        parent.children[upper.first] = upper
        for component in self.components:
            index = component.index
            for tier in (DEVICE, HOST):
                run = node.values[tier][index]
                if run is not None:
                    parts = component.split(run, pages)
                    upper.values[tier][index], node.values[tier][index] = parts
        if node.hold_count:
            upper.held = node.held[DEVICE].copy(), node.held[HOST].copy()
            upper.hold_count = node.hold_count
        for tier in (DEVICE, HOST):
            upper.occupied_children[tier] = int(node.values[tier][0] is not None)
        upper.there, node.there = _presence(upper), _presence(node)
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        upper.last_access, upper.used_ms = node.last_access, node.used_ms
        upper.hits, upper.priority, upper.saved_at = node.hits, node.priority, node.saved_at
        upper.marks = node.marks
        upper.store = node.store
        upper.persisted = frozenset(
            each.index for each in self.components if each.per_page and each.index in node.persisted
        )
        node.tokens = node.tokens[cut:]
        node.start += pages
        node.width -= pages
        self._hang(node, upper, node.tokens[: self.page_bytes])
        self.node_count += 1
        return upper

    def remove(self, node: Node) -> None:
        """Take a node without children out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.first]
        if not parent.children:
            parent.children = _CHILDLESS
        node.parent = None
        self.node_count -= 1

    def keys(self, node: Node) -> list[bytes]:
        """Return the page keys of the node's run, computed when first asked for."""
        missing: list[Node] = []
        current = node
        while current.keys is None:
            missing.append(current)
            assert current.parent is not None
            current = current.parent
        seed = current.keys[-1]
        for each in reversed(missing):
            each.keys = page_keys(seed, each.tokens, self.page_tokens)
            seed = each.keys[-1]
        assert node.keys is not None
        return node.keys

    def nodes(self) -> Iterator[Node]:
        """Yield every node below the roots, parents first, in a replicated order."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    def is_whole(self, node: Node) -> bool:
        """Say whether a match may end at `node` with what its path has on either tier."""
        return all(self._has_all(component, node) for component in self.components)

    def _has_all(self, component: Component, last: Node) -> bool:
        index = component.index
        if not index:
            # Parents have full attention wherever a child has it.
            return last.has(0)
        return all(node.has(index) for node in needed(component, last))

    def _hang(self, node: Node, parent: Node, first: bytes) -> None:
        if not parent.children:
            parent.children = {}
        node.parent, node.first = parent, first
        parent.children[first] = node

    def _new_id(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number


def needed(component: Component, last: Node) -> Iterator[Node]:
    """Yield the nodes, deepest first, whose value of a component a match ending at `last` needs."""
    start = component.needed_from(last.end)
    for node in last.path():
        if node.end <= start:
            return
        yield node


def _common_pages(run: bytes, view: memoryview, step: int) -> int:
    """Return how many whole pages two runs share; the first they do. Reads each byte about twice."""
    low, high = 1, len(view) // step
    if run.startswith(view[: high * step]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        # Beginning at `low`, which is known to be shared, `startswith` copies nothing.
        if run.startswith(view[low * step : middle * step], low * step):
            low = middle
        else:
            high = middle - 1
    return low


def _presence(node: Node) -> int:
    values = (*node.values[DEVICE], *node.values[HOST])
    return sum(1 << bit for bit, run in enumerate(values) if run is not None)
