"""Settling a prefetch: what has landed on every rank goes to the tree.

Full attention is inserted under the anchor as far as it has landed in a row, whatever became of the
rest: a later prefetch goes on from there. What other components need for the end goes to the tree
only once all of it has landed, and whether a match may then end there is for their validators to say.
"""

from ....errors import InternalError
from ...protocol.notices import Cause
from ..core.basis import Clock
from ..core.pages import PageRun, page_run
from ..operations.kinds import Prefetch
from ..operations.store import Store
from ..tree.components import Component
from ..tree.node import HOST, Node
from ..tree.prefixes import Prefixes


class Settling:
    """Gives landed pages to the tree."""

    def __init__(self, prefixes: Prefixes, clock: Clock, store: Store) -> None:
        self._prefixes = prefixes
        self._clock = clock
        self._store = store

    def settle(self, operation: Prefetch) -> int:
        """Insert what has landed; return the position that a match may reach because of it.

        The operation keeps what has not landed, and nothing else.
        """
        anchor = operation.anchor
        landed, wanted = operation.landed, operation.wanted
        if wanted and not wanted[0].component:
            full, others = wanted[0].pages[:landed], wanted[1:]
        else:
            full, others = page_run(), wanted
        self._clock.tick()
        node = self._insert(operation, anchor, full) if full else anchor
        reached = anchor.end + len(full)
        if landed >= operation.wanted_count:
            reached = operation.goal
            if node.end != reached:
                node = self._node_at(node, reached)
            for each in others:
                pages = dict(zip(each.positions, each.pages, strict=True))
                self._fill(operation, self._prefixes.components[each.component], node, pages)
            operation.assign(())
        else:
            if len(operation.needs) > 1:
                reached = operation.floor
            operation.drop(len(full))
        if not full:
            self._prefixes.use(node)
        return reached

    def _node_at(self, node: Node, end: int) -> Node:
        """Return the node of the path to `node` that ends at `end`, cut where it does not."""
        self._prefixes.cut(node, end)
        return next((each for each in node.path() if each.end == end), node)

    def _insert(self, operation: Prefetch, anchor: Node, pages: PageRun) -> Node:
        """Give pages of full attention to the path below `anchor`; return the node they lead to.

        The path counts as used before the new node is added, so that the new node is evicted last.
        """
        prefixes, residence = self._prefixes, self._prefixes.residence
        step = prefixes.tree.page_bytes
        tokens = operation.tokens[: len(pages) * step]
        node, at = anchor, 0
        for existing in prefixes.walk_to(anchor, tokens):
            self._give(operation, existing, 0, pages[at : at + existing.width])
            at += existing.width
            node = existing
        prefixes.use(node)
        if at < len(pages):
            node = prefixes.add(node, tokens[at * step :])
            node.keys = list(operation.keys[at : len(pages)])
            self._is_stored(operation, node, 0)
            residence.attach(node, HOST, 0, pages[at:], Cause.FETCHED)
        return node

    def _fill(
        self, operation: Prefetch, component: Component, last: Node, pages: dict[int, int]
    ) -> None:
        """Give a component's pages, by position, to the nodes that need them and have none."""
        if not pages:
            return
        if component.per_page:
            self._prefixes.cut(last, component.needed_from(last.end))
        start = component.needed_from(last.end)
        for node in last.path_down():
            if node.end <= start:
                continue
            positions = range(node.start, node.end) if component.per_page else (node.end - 1,)
            mine = page_run(pages.pop(each) for each in positions if each in pages)
            self._give(operation, node, component.index, mine)
        if pages:
            raise InternalError(f"pages of {component.pool} at {sorted(pages)} lie on no node")

    def _give(self, operation: Prefetch, node: Node, index: int, pages: PageRun) -> None:
        """Give a node its pages of a component, or the free list if it has some already."""
        residence, component = self._prefixes.residence, self._prefixes.components[index]
        if node.values[HOST][index] is None and len(pages) == component.pages_of(node.width):
            residence.attach(node, HOST, index, pages, Cause.FETCHED)
            self._is_stored(operation, node, index)
        else:
            residence.pools[HOST][index].give_back(pages)

    def _is_stored(self, operation: Prefetch, node: Node, index: int) -> None:
        """Note that the store has a node's pages of a component, if that is where they came from."""
        if not operation.source:
            self._store.note_read(node, index)
