"""Settling a prefetch: what has landed on every rank goes to the tree.

Full attention is inserted under the anchor as far as it has landed in a row, whatever became of the
rest: a later prefetch goes on from there. What other components need for the end goes to the tree
only once all of it has landed, and whether a match may then end there is for their validators to say.
"""

from ...errors import InternalError
from .components.base import Component
from .operations import Prefetch
from .pages import PageRun, page_run
from .state import ReplicaState
from .tree import HOST, Node


class Settling:
    """Gives landed pages to the tree."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def settle(self, operation: Prefetch) -> int:
        """Insert what has landed; return the position that a match may reach because of it.

        The operation keeps what has not landed, and nothing else.
        """
        state = self._state
        anchor = operation.anchor
        assert anchor is not None
        landed, wanted = operation.landed, operation.wanted
        if wanted and not wanted[0].component:
            full, others = wanted[0].pages[:landed], wanted[1:]
        else:
            full, others = page_run(), wanted
        state.tick()
        node = self._insert(operation, anchor, full) if full else anchor
        reached = anchor.end + len(full)
        if landed == operation.wanted_count:
            reached = operation.goal
            if node.end != reached:
                node = self._node_at(node, reached)
            for each in others:
                pages = dict(zip(each.positions, each.pages, strict=True))
                self._fill(state.components[each.component], node, pages)
            operation.assign(())
        else:
            if len(operation.needs) > 1:
                reached = operation.floor
            operation.drop(len(full))
        if not full:
            state.use(node)
        return reached

    def _node_at(self, node: Node, end: int) -> Node:
        """Return the node of the path to `node` that ends at `end`, cut where it does not."""
        self._state.cut(node, end)
        return next((each for each in node.path() if each.end == end), node)

    def _insert(self, operation: Prefetch, anchor: Node, pages: PageRun) -> Node:
        """Give pages of full attention to the path below `anchor`; return the node they lead to.

        The path is used now: before the new node is added, which so is the last to be evicted.
        """
        state = self._state
        step = state.tree.page_bytes
        tokens = operation.tokens[: len(pages) * step]
        node, at = anchor, 0
        for existing in state.walk_to(anchor, tokens):
            mine = pages[at : at + existing.width]
            if existing.values[HOST][0] is None:
                state.residence.attach(existing, HOST, 0, mine)
                state.offer(existing, 0)
            else:
                state.residence.pools[HOST][0].give_back(mine)
            at += existing.width
            node = existing
        state.use(node)
        if at < len(pages):
            node = state.add(node, tokens[at * step :])
            node.keys = list(operation.keys[at : len(pages)])
            state.offer(node, 0)
            state.residence.attach(node, HOST, 0, pages[at:])
        return node

    def _fill(self, component: Component, last: Node, pages: dict[int, int]) -> None:
        """Give a component's pages, by position, to the nodes that need them and have none."""
        state, index = self._state, component.index
        if not pages:
            return
        if component.per_page:
            state.cut(last, component.needed_from(last.end))
        start = component.needed_from(last.end)
        for node in last.path_down():
            if node.end <= start:
                continue
            positions = range(node.start, node.end) if component.per_page else (node.end - 1,)
            mine = page_run(pages.pop(each) for each in positions if each in pages)
            if node.values[HOST][index] is None and len(mine) == component.pages_of(node.width):
                state.residence.attach(node, HOST, index, mine)
                state.offer(node, index)
            else:
                state.residence.pools[HOST][index].give_back(mine)
        if pages:
            raise InternalError(f"pages of {component.pool} at {sorted(pages)} lie on no node")
