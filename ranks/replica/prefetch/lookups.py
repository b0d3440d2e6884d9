"""Lookups: the objects that a prefetch asks storage for, and those that it then reads.

Positions are pages from the start of the prefix. Full attention is asked for from `last_host_node`
on; of a component that a match needs only a part of, every object that some length beyond
`best_match_node` could need, but those that host memory has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...orders import Need
from ..operations.kinds import Prefetch
from ..settings import ReplicaConfig
from ..store import Store
from ..tree.components.base import Component
from ..tree.holds import Receipt
from ..tree.matching import reach
from ..tree.node import HOST, Node
from ..tree.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The objects that a prefetch is to ask for."""

    anchor: Node
    floor: int
    tokens: bytes
    """The tokens of the pages of full attention that are asked for."""
    needs: tuple[Need, ...]

    def pin(self, prefixes: Prefixes) -> list[Receipt]:
        """Pin what the plan counts on: the path to the anchor, and what the host has of the needs."""
        if self.anchor.parent is None:
            # There is nothing of a root that could leave.
            return []
        holds = prefixes.residence.holds
        receipts = [holds.acquire(HOST, 0, self.anchor)]
        for component, need in zip(prefixes.components[1:], self.needs[1:], strict=True):
            receipts.append(holds.acquire(HOST, component.index, self.anchor, need.first))
        return receipts


class Lookups:
    """Plans lookups, and what is read after them."""

    def __init__(self, config: ReplicaConfig, prefixes: Prefixes, store: Store) -> None:
        self._prefetch_pages_max = config.prefetch_pages_max
        self._prefixes = prefixes
        self._components = prefixes.components
        self._store = store

    def plan(self, root: Node, tokens: bytes) -> LookupPlan | None:
        """Return what a prefetch of `tokens` asks for, or None if it could bring nothing."""
        prefixes, tree = self._prefixes, self._prefixes.tree
        step = tree.page_bytes
        nodes = prefixes.walk_to(root, tokens)
        _, best, last_host = reach(prefixes.needs, nodes)
        anchor = next((node for node in nodes if node.end == last_host), root)
        if nodes and nodes[-1] is not anchor:
            # What lies beyond is on the device alone. Its backup is on its way, or had no room.
            return None
        wanted = tokens[anchor.end * step :]
        pages = min(tree.whole_pages(wanted), self._prefetch_pages_max)
        # Hashing is a good part of the cost of a prefetch that finds nothing: the bound comes first.
        wanted = wanted[: pages * step]
        keys = self._readable(prefixes.page_keys(tree.keys(anchor)[-1], wanted))
        if anchor.end + len(keys) <= best:
            return None
        others = self._components[1:]
        for component in others:
            first = component.needed_from(best + 1)
            if 0 < first < anchor.end:
                prefixes.cut(anchor, first)
        path = anchor.path_down()
        needs = [Need(self._components[0].pool, anchor.end, tuple(keys))]
        needs += [self._need(component, path, keys, best) for component in others]
        return LookupPlan(anchor, best, wanted[: len(keys) * step], tuple(needs))

    def room_for(self, operation: Prefetch, length: int) -> int:
        """Return the longest length, up to `length`, that host memory has room for."""
        available = self._prefixes.residence.available
        room = operation.anchor.end - operation.floor + available(HOST, 0)
        fits = length if length <= room else max(0, room)
        if len(self._components) == 1:
            return fits
        others = [
            (
                _missing_by_end(each, need, operation.floor + fits),
                available(HOST, each.index),
            )
            for each, need in zip(self._components[1:], operation.needs[1:], strict=True)
        ]
        while fits:
            short = max(missing(operation.floor + fits) - room for missing, room in others)
            if short <= 0:
                break
            # Each page less needs at most one object less, so no length in between fits.
            fits = max(0, fits - short)
        return fits

    def positions(self, operation: Prefetch, length: int) -> list[Sequence[int]]:
        """Return by component the positions of what has to be read for a length."""
        end = operation.floor + length
        wanted: list[Sequence[int]] = []
        for component, need in zip(self._components, operation.needs, strict=True):
            positions = range(max(need.first, component.needed_from(end)), end)
            held = need.on_host
            wanted.append([each for each in positions if each not in held] if held else positions)
        return wanted

    def _need(self, component: Component, path: list[Node], keys: list[bytes], floor: int) -> Need:
        """Return what a component needs for any length beyond `floor`."""
        first = component.needed_from(floor + 1)
        held: set[int] = set()
        asked: list[bytes] = []
        for node in path:
            if node.end <= first:
                continue
            if node.values[HOST][component.index] is not None:
                held |= set(range(node.start, node.end) if component.per_page else (node.end - 1,))
            node_keys = self._prefixes.tree.keys(node)
            asked += node_keys[max(0, first - node.start) :]
        asked += keys
        missed, pool = self._store.is_missed, component.pool
        readable = tuple(b"" if missed(pool, key) else key for key in asked)
        return Need(pool, first, readable, component.span, frozenset(held))

    def _readable(self, keys: list[bytes]) -> list[bytes]:
        """Return the leading keys of full attention that are not remembered as unreadable."""
        if self._store.misses:
            pool = self._components[0].pool
            for index, key in enumerate(keys):
                if self._store.is_missed(pool, key):
                    return keys[:index]
        return keys


def _missing_by_end(component: Component, need: Need, last: int) -> Callable[[int], int]:
    """Return a function that says how many objects an end up to `last` needs and the host lacks."""
    first, held = need.first, need.on_host
    before = [0, *accumulate(position not in held for position in range(first, last))]

    def missing(end: int) -> int:
        start = max(first, component.needed_from(end))
        return before[end - first] - before[start - first] if end > start else 0

    return missing
