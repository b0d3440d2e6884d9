"""The prefix tree: a radix tree over runs of whole pages.

A node holds a run of one or more pages: their tokens as bytes, and for each component the pages that
hold their content on each tier. Children are found by the bytes of their first page, and a run is
matched by one comparison of bytes. A split keeps the given node as the lower half, so that whoever
refers to a node refers to the end of its run, before and after.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


class Node:
    """A run of pages; see the module. Lengths and positions are in pages."""

    __slots__ = (
        "children",
        "held",
        "id",
        "keys",
        "last_access",
        "marks",
        "occupied_children",
        "parent",
        "persisted",
        "place",
        "queued",
        "start",
        "tokens",
        "values",
        "width",
    )

    def __init__(
        self, number: int, parent: "Node | None", tokens: bytes, width: int, components: int
    ) -> None:
        self.id = number
        self.parent = parent
        self.tokens = tokens
        self.width = width
        self.start = parent.end if parent is not None else 0
        self.children: dict[bytes, Node] = {}
        self.values: tuple[list[PageRun | None], list[PageRun | None]] = (
            [None] * components,
            [None] * components,
        )
        """By tier and component: the pages that hold the content, or None (a tombstone)."""
        self.held: tuple[list[int], list[int]] = ([0] * components, [0] * components)
        """By tier and component: device locks and host pins."""
        self.occupied_children = [0, 0]
        """By tier: how many children have full-attention pages there."""
        self.queued = [False, False]
        """By tier: whether an eviction queue has an entry for this node."""
        self.last_access = 0
        self.keys: list[bytes] | None = None
        self.persisted = False
        """Whether storage has these pages on every rank, as far as anyone has heard."""
        self.place = Place("")
        """Of a root: which tree it is the root of."""
        self.marks: set[int] = set()
        """Operations in flight that read or fill pages of this node."""

    @property
    def end(self) -> int:
        """The position after the node's last page."""
        return self.start + self.width

    def pages(self, tier: int, component: int = 0) -> PageRun | None:
        """Return the pages of one component on one tier, or None."""
        return self.values[tier][component]

    def holds(self, tier: int) -> int:
        """Return how often the node is locked (device) or pinned (host), over all components."""
        return sum(self.held[tier])

    def path(self) -> Iterator["Node"]:
        """Yield this node and its ancestors below the root, deepest first."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a token run is in the tree: whole nodes, then some pages of one more."""

    root: Node
    nodes: tuple[Node, ...]
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

    def walk(self, root: Node, tokens: bytes) -> Walk:
        """Follow the whole pages of `tokens` down from `root`. Does not change the tree."""
        step = self.page_bytes
        stop = len(tokens) - len(tokens) % step
        node, at = root, 0
        nodes: list[Node] = []
        while at < stop:
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            if not tokens.startswith(child.tokens, at) or at + len(child.tokens) > stop:
                return Walk(root, tuple(nodes), child, self._common_pages(child, tokens, at, stop))
            nodes.append(child)
            at += len(child.tokens)
            node = child
        return Walk(root, tuple(nodes), None, 0)

    def _common_pages(self, child: Node, tokens: bytes, at: int, stop: int) -> int:
        # Bisection over prefixes: each probe is one comparison of bytes, and the first page matches.
        low, high = 1, min(child.width, (stop - at) // self.page_bytes)
        while low < high:
            middle = (low + high + 1) // 2
            length = middle * self.page_bytes
            if tokens[at : at + length] == child.tokens[:length]:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Hang a new node with a run of whole pages under `parent`, which has no such child."""
        width = self.whole_pages(tokens)
        node = Node(self._new_id(), parent, tokens, width, len(self.components))
        parent.children[tokens[: self.page_bytes]] = node
        self.node_count += 1
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut the first `pages` pages off `node` into a new parent of it, which is returned."""
        parent = node.parent
        if parent is None or not 0 < pages < node.width:
            raise InternalError(f"node {node.id} of {node.width} pages cannot be cut at {pages}")
        cut = pages * self.page_bytes
        upper = Node(self._new_id(), parent, node.tokens[:cut], pages, len(self.components))
        parent.children[node.tokens[: self.page_bytes]] = upper
        for tier in (DEVICE, HOST):
            for component, run in enumerate(node.values[tier]):
                if run is not None:
                    upper.values[tier][component], node.values[tier][component] = self.components[
                        component
                    ].split(run, pages)
            upper.held[tier][:] = node.held[tier]
            upper.occupied_children[tier] = int(node.values[tier][0] is not None)
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        upper.last_access = node.last_access
        upper.persisted = node.persisted
        upper.marks = set(node.marks)
        node.parent = upper
        node.tokens = node.tokens[cut:]
        node.start += pages
        node.width -= pages
        upper.children[node.tokens[: self.page_bytes]] = node
        self.node_count += 1
        return upper

    def remove(self, node: Node) -> None:
        """Take a node without children out of the tree."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.tokens[: self.page_bytes]]
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

    def _new_id(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number
