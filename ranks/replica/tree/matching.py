"""Matching: how much of a token run is cached, and where a prefetch or load back begins.

`best_match_node` is the deepest node at which every component lets a match end with what is on the
device or the host: the only anchor for a load back (incident B). `last_host_node` is the deepest node
down to which full attention is in host memory: the anchor of a prefetch.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .components import Component, Needs
from .node import Node, Place, needed
from .prefixes import Prefixes


class Match(NamedTuple):
    """How much of a token run is cached. Lengths in tokens, always whole pages."""

    device_tokens: int
    """The prefix that can be used as it lies on the device; 0 where the engine owns its pages."""
    host_tokens: int
    """The prefix that can be restored from device and host memory (to `best_match_node`)."""
    last_host_tokens: int = 0
    """The prefix of which full attention is in host memory (to `last_host_node`)."""


def reach(
    needs: Needs, nodes: list[Node], partial: Node | None = None, pages: int = 0
) -> tuple[int, int, int]:
    """Return how far a path goes, of which of `partial` only the first `pages` count.

    In pages: as it lies on the device; to `best_match_node`; to `last_host_node`.

    Incident B: a match ends where every component accepts, and not at the deepest node that is there.
    """
    path = nodes
    if partial is not None:
        path = [*nodes, partial]
    elif nodes:
        pages = nodes[-1].width
    else:
        return 0, 0, 0
    last = path[-1]
    end = last.start + pages
    if needs.is_plain and last.there & needs.every:
        return end, end, _last_host(needs.host, path, end) if path[0].there & needs.host else 0
    device = _deepest(needs, path, pages, partial is not None, 0)
    # What is whole on the device alone up to the end cannot be more on both tiers.
    best = device
    if device != end:
        best = _deepest(needs, path, pages, partial is not None, needs.components)
    return device, best, _last_host(needs.host, path, end)


def _last_host(bit: int, path: list[Node], end: int) -> int:
    """Return where full attention ends on the host; a node has it there if a child has."""
    if path[-1].there & bit:
        return end
    if path[0].there & bit:
        return next(node.end for node in reversed(path) if node.there & bit)
    return 0


def _deepest(needs: Needs, path: list[Node], last_pages: int, is_partial: bool, shift: int) -> int:
    """Return the deepest position at which a match may end.

    The last node of the path counts for `last_pages`. With a shift of the number of components, a
    value on the host counts as well.
    """
    every, windows = needs.every, needs.windows
    skipped = is_partial and not needs.within_nodes
    for at in range(len(path) - skipped, 0, -1):
        node = path[at - 1]
        there = node.there
        if (there | there >> shift) & every != every:
            continue
        width = last_pages if at == len(path) else node.width
        for bit, span in windows:
            above, run = at - 1, width
            while run < span and above:
                before = path[above - 1]
                there = before.there
                if not (there | there >> shift) & bit:
                    break
                run += before.width
                above -= 1
            if run < span and above:
                break
        else:
            return node.start + width
    return 0


def match(prefixes: Prefixes, place: Place, tokens: bytes | memoryview) -> Match:
    """Return how much of `tokens` is cached. Changes nothing."""
    tree = prefixes.tree
    root = tree.roots.get(place)
    if root is None:
        return _NO_MATCH
    device, best, last_host = reach(prefixes.needs, *tree.follow(root, tokens))
    unit = tree.page_tokens
    return Match(device * unit, best * unit, last_host * unit)


_NO_MATCH = Match(0, 0, 0)

Missing = tuple[Node, int]
"""A node, and a component that has no value there on some tier."""


def lacking(components: Iterable[Component], node: Node, tier: int) -> list[Missing]:
    """Return what a match ending at `node` needs and a tier has not, by component, from the top."""
    missing: list[Missing] = []
    for component in components:
        index = component.index
        lacks: list[Missing] = []
        for each in needed(component, node):
            if each.values[tier][index] is None:
                lacks.append((each, index))
            elif not index:
                # What has full attention on a tier has it all the way up.
                break
        missing += reversed(lacks)
    return missing
