"""The cached prefixes: one tree per identity (namespace, reset generation, weights version)."""

from ..core.replica_parts import ReplicaParts
from .components import Needs, components_of
from .node import Node, TreeIdentity
from .page_allocator import PageAllocator
from .tokens import namespace_seed, page_keys
from .tree import Tree


class Prefixes:
    """All prefix trees, and the elementary steps that change them."""

    def __init__(self, basis: ReplicaParts, allocator: type[PageAllocator] = PageAllocator) -> None:
        self._config = config = basis.config
        self._clock = basis.clock
        self.components = components_of(config)
        self.needs = Needs(self.components)
        self.tree = Tree(config.page_tokens, self.components)
        self.allocator = allocator(
            basis, self.tree, emptied=self.drop_root_if_unused, split=self.split
        )
        self.users: dict[TreeIdentity, int] = {}
        """Number of requests and prefetches that use each tree; unused trees have no entry."""
        self.begun = 0
        """Number of tree roots created so far."""

    def root(self, place: TreeIdentity) -> Node:
        """Return the root of the tree with this identity, created on first use."""
        existing = self.tree.roots.get(place)
        if existing is not None:
            return existing
        self.begun += 1
        return self.tree.plant(place, self._seed(place))

    def _seed(self, place: TreeIdentity) -> bytes:
        config, (namespace, generation, version) = self._config, place
        return namespace_seed(config.model_digest, namespace, generation, config.life, version)

    def join(self, place: TreeIdentity) -> None:
        """Count one more request or prefetch as a user of a tree."""
        self.users[place] = self.users.get(place, 0) + 1

    def leave(self, place: TreeIdentity) -> None:
        """Count one user of a tree less; drop the tree's root if no user or child is left."""
        left = self.users[place] - 1
        if left:
            self.users[place] = left
            return
        del self.users[place]
        root = self.tree.roots.get(place)
        if root is not None:
            self.drop_root_if_unused(root)

    def drop_root_if_unused(self, node: Node) -> None:
        """Remove a root that has no children and whose tree no request or prefetch uses."""
        # Drop unused roots, because each request may use its own salt, hence its own root.
        unused = not node.children and node.place not in self.users
        if node.parent is None and unused and self.tree.roots.get(node.place) is node:
            del self.tree.roots[node.place]

    def last_key(self, place: TreeIdentity, tokens: bytes) -> bytes:
        """Return the key of the last whole page of `tokens`. Changes nothing."""
        tree, root = self.tree, self.tree.roots.get(place)
        last, done = self._seed(place), 0
        if root is not None:
            nodes, partial, pages = tree.follow(root, tokens)
            if partial is not None:
                last, done = tree.keys(partial)[pages - 1], partial.start + pages
            elif nodes:
                last, done = tree.keys(nodes[-1])[-1], nodes[-1].end
        rest = page_keys(last, tokens[done * tree.page_bytes :], tree.page_tokens)
        return (rest or [last])[-1]

    def use(self, node: Node, *, hits: int = 0, priority: int = 0) -> None:
        """Mark each node on the path to `node` as used by a request of this priority.

        Adds `hits` to each node's hits.
        """
        self.allocator.touch(node, self._clock, hits, priority)

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Add a new node under `parent` with a run of whole pages, marked as used now."""
        node = self.tree.add(parent, tokens)
        node.last_access, node.used_ms = self._clock.uses, self._clock.agreed_ms
        return node

    def split(self, node: Node, pages: int) -> None:
        """Split a node after its first `pages` pages; operations on it then refer to both halves."""
        upper = self.tree.split(node, pages)
        self.allocator.was_split(upper)
        for mark in node.marks:
            mark.was_split(node, upper)

    def mend(self) -> None:
        """Merge neighbouring nodes that nothing divides any more (rule R15).

        Called at the end of each command and verdict, when only lock handles, marks and pins refer to
        nodes. Checks changed nodes and their neighbours.
        """
        changed, merge = self.allocator.changed, self.allocator.merge
        if not changed:
            return
        nodes = list(changed)
        changed.clear()
        for each in nodes:
            node, parent = each, each.parent
            if parent is None:
                # Skip a node without a parent: it is a root, was removed, or was merged into its child.
                continue
            while parent is not None and parent.parent is not None and len(parent.children) == 1:
                if not merge(parent, node):
                    break
                parent = node.parent
            while len(node.children) == 1:
                (child,) = node.children.values()
                if not merge(node, child):
                    break
                node = child

    def cut(self, node: Node, position: int) -> None:
        """Split a node on the path to `node`, if needed, so that some node begins at `position`."""
        for each in node.path():
            if each.start < position < each.end:
                self.split(each, position - each.start)
                return
            if each.start <= position:
                return

    def note_end(self, node: Node, position: int) -> None:
        """Record that matches may end at `position` on the path to `node`."""
        self.cut(node, position)
        for each in node.path():
            if each.end == position:
                each.is_match_end = True
                return

    def cut_for(self, node: Node) -> None:
        """Split the path to `node` where the windows begin that a match ending at `node` needs."""
        for _, span in self.needs.windows:
            if node.end > span:
                self.cut(node, node.end - span)

    def walk_to(self, root: Node, tokens: bytes) -> list[Node]:
        """Return the nodes of the longest cached prefix of `tokens`; a partly matched node is split."""
        return self.cut_to(*self.tree.follow(root, tokens))

    def cut_to(self, nodes: list[Node], partial: Node | None, pages: int) -> list[Node]:
        """Split the first `pages` pages off the node `partial`; return `nodes` and the new node."""
        if partial is not None:
            self.split(partial, pages)
            upper = partial.parent
            assert upper is not None
            nodes.append(upper)
        return nodes

    def grow_to(self, root: Node, tokens: bytes) -> Node:
        """Return the node at which the whole pages of `tokens` end; add it if it is missing."""
        nodes = self.walk_to(root, tokens)
        node = nodes[-1] if nodes else root
        if node.end < self.tree.whole_pages(tokens):
            return self.add(node, tokens[node.end * self.tree.page_bytes :])
        return node
