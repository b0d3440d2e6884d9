"""The cached prefixes: a tree for each place, where its pages are, and when they were used."""

from ..core.basis import Basis
from .components import Needs, components_of
from .node import Node, Place
from .residence import Residence
from .tokens import namespace_seed, page_keys
from .tree import Tree


class Prefixes:
    """The trees of all places, and the elementary steps in which they change."""

    def __init__(self, basis: Basis, residence: type[Residence] = Residence) -> None:
        self._config = config = basis.config
        self._clock = basis.clock
        self.components = components_of(config)
        self.needs = Needs(self.components)
        self.tree = Tree(config.page_tokens, self.components)
        self.residence = residence(
            basis, self.tree, emptied=self.drop_root_if_unused, split=self.split
        )
        self.users: dict[Place, int] = {}
        """How many requests each place has; a place without any is not there."""
        self.begun = 0
        """How often a place was made that was not there."""

    def root(self, place: Place) -> Node:
        """Return the root of a place, which is made at its first use."""
        existing = self.tree.roots.get(place)
        if existing is not None:
            return existing
        self.begun += 1
        return self.tree.plant(place, self._seed(place))

    def _seed(self, place: Place) -> bytes:
        config, (namespace, generation, version) = self._config, place
        return namespace_seed(config.model_digest, namespace, generation, config.life, version)

    def join(self, place: Place) -> None:
        """Note that a request has come to a place."""
        self.users[place] = self.users.get(place, 0) + 1

    def leave(self, place: Place) -> None:
        """Note that a request has left a place."""
        left = self.users[place] - 1
        if left:
            self.users[place] = left
            return
        del self.users[place]
        root = self.tree.roots.get(place)
        if root is not None:
            self.drop_root_if_unused(root)

    def drop_root_if_unused(self, node: Node) -> None:
        """Forget a root that has no children and whose place has no requests."""
        # Salts may be as many as requests, and a root for each would grow without bound.
        unused = not node.children and node.place not in self.users
        if node.parent is None and unused and self.tree.roots.get(node.place) is node:
            del self.tree.roots[node.place]

    def last_key(self, place: Place, tokens: bytes) -> bytes:
        """Return the key of the last whole page of `tokens`. Reads only."""
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
        """Mark the path to `node` as used now, hit `hits` times more, by a request of this priority."""
        self.residence.touch(node, self._clock, hits, priority)

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Hang a new node, used now, with a run of whole pages under `parent`."""
        node = self.tree.add(parent, tokens)
        node.last_access, node.used_ms = self._clock.uses, self._clock.agreed_ms
        return node

    def split(self, node: Node, pages: int) -> None:
        """Cut a node after its first `pages` pages; what works on it keeps both halves."""
        upper = self.tree.split(node, pages)
        self.residence.was_split(upper)
        for mark in node.marks:
            mark.was_split(node, upper)

    def mend(self) -> None:
        """Make one node of neighbours that nothing divides any more (rule R15).

        At the end of each command and verdict, when nobody refers to nodes but by receipts, marks and
        pins. Looks at the nodes of which something has changed, and at those beside them.
        """
        changed, merge = self.residence.changed, self.residence.merge
        if not changed:
            return
        nodes = list(changed)
        changed.clear()
        for each in nodes:
            node, parent = each, each.parent
            if parent is None:
                # It is a root, or has left the tree, or is one with its child by now.
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
        """Make sure that some node of the path to `node` begins at `position`."""
        for each in node.path():
            if each.start < position < each.end:
                self.split(each, position - each.start)
                return
            if each.start <= position:
                return

    def note_end(self, node: Node, position: int) -> None:
        """Remember that matches may end at `position` of the path to `node`."""
        self.cut(node, position)
        for each in node.path():
            if each.end == position:
                each.is_match_end = True
                return

    def cut_for(self, node: Node) -> None:
        """Cut the path where the components' needs of a match that ends at `node` begin."""
        for _, span in self.needs.windows:
            if node.end > span:
                self.cut(node, node.end - span)

    def walk_to(self, root: Node, tokens: bytes) -> list[Node]:
        """Return the nodes that hold `tokens`, as far as they are in the tree, cut to fit."""
        return self.cut_to(*self.tree.follow(root, tokens))

    def cut_to(self, nodes: list[Node], partial: Node | None, pages: int) -> list[Node]:
        """Return the nodes that match whole, and the part that matches of a node that is cut for it."""
        if partial is not None:
            self.split(partial, pages)
            upper = partial.parent
            assert upper is not None
            nodes.append(upper)
        return nodes

    def grow_to(self, root: Node, tokens: bytes) -> Node:
        """Return the node that the whole pages of `tokens` end with, which is added if need be."""
        nodes = self.walk_to(root, tokens)
        node = nodes[-1] if nodes else root
        if node.end < self.tree.whole_pages(tokens):
            return self.add(node, tokens[node.end * self.tree.page_bytes :])
        return node
