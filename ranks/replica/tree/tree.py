"""The prefix tree: a radix tree over runs of whole pages.

A node holds a run of one or more pages: their tokens as bytes, and for each component the pages that
hold their content on each tier. Children are found by the bytes of their first page, and a run is
matched by one comparison of bytes. A split keeps the given node as the lower half, so that whoever
refers to a node refers to the end of its run, before and after.
"""

from collections.abc import Iterable, Iterator, Sequence

from ....errors import InternalError
from .components import Component
from .node import CHILDLESS, DEVICE, HOST, Node, Place, needed
from .tokens import TOKEN_BYTES, page_keys

COPIED_BYTES = 64 << 10
"""Up to so many bytes of tokens are copied for a walk."""


class Tree:
    """One radix tree for each place, under a root of its own."""

    def __init__(self, page_tokens: int, components: Sequence[Component]) -> None:
        self.page_tokens = page_tokens
        self.components = tuple(components)
        self.page_bytes = page_tokens * TOKEN_BYTES
        """The bytes of one page's token ids."""
        per_page = sum(1 << each.index for each in components if each.per_page)
        self._in_pages = frozenset(each.index for each in components if each.per_page)
        self._per_page = per_page | per_page << len(components)
        """The bits of `Node.there` of components that have a page for each page of tokens."""
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

    def follow(self, root: Node, tokens: bytes | memoryview) -> tuple[list[Node], Node | None, int]:
        """Follow the whole pages of `tokens` down from `root`. Does not change anything.

        Returns the nodes that match whole, a child that matches in part, and how many pages of it.
        """
        step = self.page_bytes
        nodes: list[Node] = []
        children = root.children
        if not children:
            return nodes, None, 0
        stop = len(tokens) - len(tokens) % step
        at = 0
        if stop <= COPIED_BYTES:
            # So little is cheaper to copy once than to look at through a view for each node.
            tokens = bytes(tokens)
        if isinstance(tokens, bytes):
            while at < stop:
                child = children.get(tokens[at : at + step])
                if child is None:
                    return nodes, None, 0
                run = child.tokens
                if not tokens.startswith(run, at):
                    break
                nodes.append(child)
                at += len(run)
                children = child.children
        view = memoryview(tokens)
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
        cut, count, tokens = pages * self.page_bytes, len(self.components), node.tokens
        upper = Node(self._new_id(), parent, bytes(memoryview(tokens)[:cut]), pages, count)
        upper.first = node.first
        upper.begins, node.begins = node.begins, 0
        parent.children[upper.first] = upper
        for component in self.components:
            index = component.index
            for tier in (DEVICE, HOST):
                run = node.values[tier][index]
                if run is not None:
                    above, below = component.split(run, pages)
                    upper.values[tier][index], node.values[tier][index] = above, below
                    bit = 1 << (tier * count + index)
                    upper.there |= bit if above is not None else 0
                    node.there &= ~bit if below is None else -1
        if node.hold_count:
            upper.held = node.held[DEVICE].copy(), node.held[HOST].copy()
            for held in upper.held:
                # Of full attention its one child is held now, and nothing ends with it.
                held[0] = min(held[0], 1)
            upper.hold_count = sum(map(sum, upper.held))
        for tier in (DEVICE, HOST):
            upper.occupied_children[tier] = int(node.values[tier][0] is not None)
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        upper.last_access, upper.used_ms = node.last_access, node.used_ms
        upper.hits, upper.priority, upper.saved_at = node.hits, node.priority, node.saved_at
        upper.marks = node.marks
        upper.store, upper.stored_at = node.store, node.stored_at
        upper.persisted = node.persisted & self._in_pages
        if isinstance(tokens, bytearray):
            # In place, since it may be a long conversation of which the end is to be evicted.
            del tokens[:cut]
        else:
            node.tokens = tokens[cut:]
        node.start += pages
        node.width -= pages
        self._hang(node, upper, bytes(node.tokens[: self.page_bytes]))
        self.node_count += 1
        return upper

    def divided(self, upper: Node, lower: Node) -> bool:
        """Say whether something keeps a node and its only child apart (rule R15).

        A lock or pin that ends or begins between them, an operation in flight on either, pages that
        only one of them has, a state or a match at the end of the upper one, or another history.
        """
        if upper.ends or lower.begins or upper.marks or lower.marks or len(upper.children) > 1:
            return True
        if upper.is_match_end:
            return True
        if (upper.there ^ lower.there) & self._per_page or upper.there & ~self._per_page:
            return True
        # Where a state is stored says nothing of the node above it, which has none.
        stored = upper.persisted ^ lower.persisted
        return upper.history != lower.history or bool(stored & self._in_pages)

    def merge(self, upper: Node, lower: Node) -> None:
        """Make one node of two that nothing divides: `lower`, which grows upwards.

        Costs what the lower one has, which is added to the lists of the upper one.
        """
        parent = upper.parent
        assert parent is not None
        tokens = upper.tokens if isinstance(upper.tokens, bytearray) else bytearray(upper.tokens)
        tokens += lower.tokens
        if upper.keys is not None:
            upper.keys += self.keys(lower)
        lower.tokens, lower.keys, lower.begins = tokens, upper.keys, upper.begins
        for above, below in zip(upper.values, lower.values, strict=True):
            for index, run in enumerate(above):
                mine = below[index]
                if run is not None and mine is not None:
                    run.extend(mine)
                    below[index] = run
        lower.start = upper.start
        lower.width += upper.width
        lower.hits, lower.priority = upper.hits, max(lower.priority, upper.priority)
        lower.parent, lower.first = parent, upper.first
        parent.children[upper.first] = lower
        upper.parent, upper.children = None, CHILDLESS
        self.node_count -= 1

    def remove(self, node: Node) -> None:
        """Take a node without children out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.first]
        if not parent.children:
            parent.children = CHILDLESS
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

    def key_before(self, node: Node) -> bytes:
        """Return the key that those of the node's run continue."""
        assert node.parent is not None
        return self.keys(node.parent)[-1]

    def nodes(self, roots: Iterable[Node] | None = None) -> Iterator[Node]:
        """Yield every node below `roots`, or below all, parents first, in a replicated order."""
        waiting = list(self.roots.values() if roots is None else roots)
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    def is_whole(self, node: Node) -> bool:
        """Say whether a match may end at `node` with what its path has on either tier."""
        # Parents have full attention wherever a child has it.
        return node.has(0) and all(
            each.has(component.index)
            for component in self.components[1:]
            for each in needed(component, node)
        )

    def _hang(self, node: Node, parent: Node, first: bytes) -> None:
        if not parent.children:
            parent.children = {}
        node.parent, node.first = parent, first
        parent.children[first] = node

    def _new_id(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number


def _common_pages(run: bytes | bytearray, view: memoryview, step: int) -> int:
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
