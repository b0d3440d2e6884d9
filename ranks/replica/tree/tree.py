"""The prefix tree: a radix tree over runs of whole pages.

A node holds a run: its tokens as bytes and, for each component, the pages on each tier. Children are
found by the bytes of their first page, and a run is matched by one comparison. A split keeps the given
node as the lower half, so references to a node always mean the end of its run.
"""

from collections.abc import Iterable, Iterator, Sequence

from ....errors import InternalError
from .components import Component
from .node import CHILDLESS, DEVICE, HOST, Node, TreeIdentity, needed
from .tokens import TOKEN_BYTES, page_keys

COPIED_BYTES = 64 << 10
"""Token runs of up to this many bytes are copied before a walk, because slicing bytes is faster than
slicing a memory view."""


class Tree:
    """The radix trees, one per identity (namespace, reset generation, weights version)."""

    def __init__(self, page_tokens: int, components: Sequence[Component]) -> None:
        self.page_tokens = page_tokens
        self.components = tuple(components)
        self.page_bytes = page_tokens * TOKEN_BYTES
        """Number of bytes of one page's token ids."""
        per_page = sum(1 << each.index for each in components if each.per_page)
        self._in_pages = frozenset(each.index for each in components if each.per_page)
        self._per_page = per_page | per_page << len(components)
        """The bits of `Node.there`, on both tiers, of components with one page per page of tokens."""
        self.roots: dict[TreeIdentity, Node] = {}
        self.node_count = 0
        self._next_id = 1

    def plant(self, place: TreeIdentity, seed: bytes) -> Node:
        """Create and return the root of a tree that has no root yet."""
        root = Node(self._new_id(), None, b"", 0, len(self.components))
        root.keys = [seed]
        root.place = place
        self.roots[place] = root
        return root

    def whole_pages(self, tokens: bytes) -> int:
        """Return how many whole pages `tokens` fill."""
        return len(tokens) // self.page_bytes

    def follow(self, root: Node, tokens: bytes | memoryview) -> tuple[list[Node], Node | None, int]:
        """Walk down from `root` along the whole pages of `tokens`. Changes nothing.

        Returns the fully matched nodes, a child that matches in part, and how many of its pages match.
        """
        step = self.page_bytes
        nodes: list[Node] = []
        children = root.children
        if not children:
            return nodes, None, 0
        stop = len(tokens) - len(tokens) % step
        at = 0
        if stop <= COPIED_BYTES:
            # Copy a short run, because one copy is cheaper than slicing a memory view at each node.
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
            # Compare the run in place; if fewer tokens are left than the run has, compare only its
            # beginning.
            if end > stop or not run.startswith(view[at:end]):
                pages = _common_pages(run, view[at : min(end, stop)], step)
                return nodes, child, pages
            nodes.append(child)
            at = end
            children = child.children
        return nodes, None, 0

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Add a node with a run of whole pages; `parent` must have no child with that first page."""
        step = self.page_bytes
        node = Node(self._new_id(), parent, tokens, len(tokens) // step, len(self.components))
        self._hang(node, parent, tokens[:step])
        self.node_count += 1
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Split the first `pages` pages off `node` into a new parent node, and return that parent."""
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
                # The upper half counts the lower half as its one held child; no full-attention lock
                # handle ends at the upper half.
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
            # A copy would be slow for a long conversation whose end is being evicted, so delete the
            # upper half's bytes in place.
            del tokens[:cut]
        else:
            node.tokens = tokens[cut:]
        node.start += pages
        node.width -= pages
        self._hang(node, upper, bytes(node.tokens[: self.page_bytes]))
        self.node_count += 1
        return upper

    def divided(self, upper: Node, lower: Node) -> bool:
        """Return whether a node and its only child must stay separate (rule R15).

        Reasons: a lock or pin begins or ends between them, an operation is in flight on either, only
        one has pages of a component, `upper` ends with a state or match end, or their last uses,
        backups or store records differ.
        """
        if upper.ends or lower.begins or upper.marks or lower.marks or len(upper.children) > 1:
            return True
        if upper.is_match_end:
            return True
        if (upper.there ^ lower.there) & self._per_page or upper.there & ~self._per_page:
            return True
        # Ignore the store records of states, because only `lower` can have a state.
        stored = upper.persisted ^ lower.persisted
        return upper.history != lower.history or bool(stored & self._in_pages)

    def merge(self, upper: Node, lower: Node) -> None:
        """Merge `upper` into its only child `lower`, which then begins where `upper` began.

        The caller has checked that nothing divides the two (see `divided`). The pages of `lower` are
        appended to the lists of `upper`, so the cost is proportional to `lower`.
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
        """Remove a node without children from the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.first]
        if not parent.children:
            parent.children = CHILDLESS
        node.parent = None
        self.node_count -= 1

    def keys(self, node: Node) -> list[bytes]:
        """Return the page keys of the node's run, computed on first use."""
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
        """Return the key of the page before the node's run."""
        assert node.parent is not None
        return self.keys(node.parent)[-1]

    def nodes(self, roots: Iterable[Node] | None = None) -> Iterator[Node]:
        """Yield every node below `roots` (default: all), parents first; equal order on all ranks."""
        waiting = list(self.roots.values() if roots is None else roots)
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(node.children.values())

    def is_whole(self, node: Node) -> bool:
        """Return whether a match may end at `node` with the pages that its path has on either tier."""
        # Check full attention only at `node`: if it has full attention, so have all its ancestors.
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
    """Return how many whole pages two runs share, given that the first page is equal."""
    low, high = 1, len(view) // step
    if run.startswith(view[: high * step]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        # The pages before `low` are equal, so compare only from `low` on.
        if run.startswith(view[low * step : middle * step], low * step):
            low = middle
        else:
            high = middle - 1
    return low
