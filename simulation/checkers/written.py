"""Checks that cached prefixes have been written to the store, once nothing is in flight.

The store must be healthy. The write policy says which pages must be written. With write-through, these
are all pages on the device, including window and state pages that a match needs. Under every policy,
they include all pages in host memory.
"""

from collections.abc import Iterable, Iterator, Sequence

from ...ranks.group.member.inspection import Inspection
from ...ranks.protocol.config import WritePolicy
from ...ranks.replica.attaching import StoreState
from ...ranks.replica.tree.components import Component
from ...ranks.replica.tree.node import DEVICE, HOST, Node, needed
from ..rank.memory import SimulatedStore
from ..world.violated import Violated

_Piece = tuple[Component, Node, int]
"""(component, tree node, page position). The node's pages from this position on must be in the store.
"""


def check_written(seen: Inspection, stores: Sequence[SimulatedStore]) -> None:
    """Raise unless each rank's store has accepted all pages that the write policy requires it to have.

    Nothing is checked if a store was attached after the start, because that store need not have older
    pages. Nothing is checked while pages are quarantined, because the pools may then lack free pages.
    """
    if promises_anything(seen):
        for node in seen.prefixes.tree.nodes():
            _check(seen, stores, _promised(seen, node))


def check_written_again(
    seen: Inspection, stores: Sequence[SimulatedStore], served: Iterable[tuple[str, bytes]]
) -> None:
    """Raise unless each rank's store has the host pages of the prompts in `served`.

    Each entry has the namespace and the tokens of a prompt that was served after the store had lost all
    its objects.
    """
    tree = seen.prefixes.tree
    for namespace, tokens in served if promises_anything(seen) else ():
        root = tree.roots.get(seen.requests.place(namespace))
        nodes = [] if root is None else tree.follow(root, tokens)[0]
        for node in nodes:
            _check(seen, stores, _on_host(seen, node), lost=True)


def promises_anything(seen: Inspection) -> bool:
    """Return whether pages must be in the store: one store from the start, and nothing in flight."""
    first = seen.config.has_store and seen.stores == 1
    return first and seen.store_state is StoreState.ATTACHED and not seen.in_flight


def _check(
    seen: Inspection,
    stores: Sequence[SimulatedStore],
    promised: Iterable[_Piece],
    *,
    lost: bool = False,
) -> None:
    never = "never accepted by the store"
    if lost:
        never = "used, and not written again to a store that lost them"
    for component, part, first in promised:
        for key in _keys(seen, component, part, first) if seen.keeps(part) else ():
            for rank, store in enumerate(stores):
                if (component.pool, key) not in store.accepted:
                    pages = f"its {component.pool} pages up to {part.end}"
                    what = f"node {part.id} is in memory at rest, and {pages}"
                    raise Violated(f"rank {rank}: {what} were {never}")


def _on_host(seen: Inspection, node: Node) -> Iterator[_Piece]:
    for component in seen.prefixes.components:
        if node.values[HOST][component.index] is not None:
            yield component, node, node.start


def _promised(seen: Inspection, node: Node) -> Iterator[_Piece]:
    """Yield the pages of a node and its ancestors that must be in the store."""
    components = seen.prefixes.components
    yield from _on_host(seen, node)
    through = seen.config.write_policy is WritePolicy.WRITE_THROUGH
    if not (through and seen.config.device_pages):
        return
    full = components[0]
    if node.values[DEVICE][0] is not None:
        yield full, node, node.start
    fits = node.end <= seen.config.host_pages and _fits(seen)
    if node.is_match_end and seen.prefixes.tree.is_whole(node) and fits:
        yield from _for_match(components[1:], node)
        if all(each.per_page for each in components) and node.width > 1:
            # If the same prompt is sent again, its last token must be computed, so the match may end
            # one page earlier. The store must also have the window pages for this shorter match.
            yield from _before(components[1:], node)


def _fits(seen: Inspection) -> bool:
    """Return whether each window or state pool on the host has more pages than one match needs.

    For a window pool, this means more pages than a window plus one. In a smaller pool, two matches that
    end at different pages of one tree path can evict the window pages of each other.
    """
    pages = seen.config.pool_pages(HOST)[1:]
    spans = ((each.span or 0) + each.per_page for each in seen.prefixes.components[1:])
    return all(span < room for span, room in zip(spans, pages, strict=True))


def _for_match(components: Sequence[Component], node: Node) -> Iterator[_Piece]:
    for component in components:
        for each in needed(component, node):
            yield component, each, component.needed_from(node.end)


def _before(components: Sequence[Component], node: Node) -> Iterator[_Piece]:
    """Yield the window pages in memory that a match needs if it ends a page before `node` ends."""
    for component in components:
        start = component.needed_from(node.end - 1)
        for each in node.path():
            there = each.has(component.index)
            if each.end > start and each.start < component.needed_from(node.end) and there:
                yield component, each, start


def _keys(seen: Inspection, component: Component, node: Node, first: int) -> Sequence[bytes]:
    keys = seen.prefixes.tree.keys(node)
    return keys[max(0, first - node.start) :] if component.per_page else keys[-1:]
