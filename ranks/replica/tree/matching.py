"""Prefix matching: how much of a token run is cached, and where a prefetch or load back begins.

`best_match_node` is the deepest node at which every component accepts a match from device or host: the
only anchor for a load back (incident B). `last_host_node` is the deepest node with full attention in
host memory: the anchor of a prefetch.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .components import Component, Needs
from .node import Node, TreeIdentity, needed
from .prefixes import Prefixes


class Match(NamedTuple):
    """How much of a token run is cached. Lengths are in tokens, always whole pages."""

    device_tokens: int
    """Length of the prefix usable on the device as it is; 0 if the engine owns the device pages."""
    host_tokens: int
    """Length of the prefix restorable from device and host memory: the end of `best_match_node`."""
    last_host_tokens: int = 0
    """Length of the prefix whose full attention is in host memory: the end of `last_host_node`."""


def reach(
    needs: Needs, nodes: list[Node], partial: Node | None = None, pages: int = 0
) -> tuple[int, int, int]:
    """Return (device, best, host): how far a path is cached, as three lengths in pages.

    The path is `nodes` and, if given, the node `partial`, of which only the first `pages` pages match.
    The device has everything that a match of length `device` needs. Device and host together have
    everything that a match of length `best` needs. The host has full attention up to `host`. Incident
    B: a match ends where every component accepts it, not at the deepest node.
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
    # Skip host memory if the device alone covers the path to its end.
    best = device
    if device != end:
        best = _deepest(needs, path, pages, partial is not None, needs.components)
    return device, best, _last_host(needs.host, path, end)


def _last_host(bit: int, path: list[Node], end: int) -> int:
    """Return the position up to which a path has full attention on the host."""
    if path[-1].there & bit:
        return end
    if path[0].there & bit:
        return next(node.end for node in reversed(path) if node.there & bit)
    return 0


def _deepest(needs: Needs, path: list[Node], last_pages: int, is_partial: bool, shift: int) -> int:
    """Return the deepest position at which a match may end.

    Of the path's last node only the first `last_pages` pages match. If `shift` is the number of
    components, pages on the host count like pages on the device. If `shift` is 0, only pages on the
    device count.
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


def match(prefixes: Prefixes, place: TreeIdentity, tokens: bytes | memoryview) -> Match:
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
"""(node, index of a component): the node has no pages of the component on the tier in question."""


def lacking(components: Iterable[Component], node: Node, tier: int) -> list[Missing]:
    """Return the (node, component) pairs that a match at `node` needs and whose pages a tier lacks.

    Ordered by component, then from the root down.
    """
    missing: list[Missing] = []
    for component in components:
        index = component.index
        lacks: list[Missing] = []
        for each in needed(component, node):
            if each.values[tier][index] is None:
                lacks.append((each, index))
            elif not index:
                # Stop at a node with full attention on the tier, because all its ancestors then have
                # it, too.
                break
        missing += reversed(lacks)
    return missing
