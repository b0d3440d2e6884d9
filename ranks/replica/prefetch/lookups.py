"""Lookups: the objects that a prefetch asks storage for, and those that it then reads.

Positions are pages from the start of the prefix. Full attention is asked for from `last_host_node`
on; of a component that a match needs only a part of, every object that some length beyond
`best_match_node` could need, but those that host memory has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...protocol.orders import Need
from ...protocol.replica_config import ReplicaConfig
from ..operations.kinds import Prefetch
from ..operations.store import Store
from ..tree.components import Component
from ..tree.holds import Receipt
from ..tree.matching import reach
from ..tree.node import HOST, Node, Place
from ..tree.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The objects that a prefetch is to ask for."""

    anchor: Node
    floor: int
    tokens: bytes
    """The tokens of the pages of full attention that are asked for."""
    components: tuple[Component, ...]
    needs: tuple[Need, ...]
    """What is asked for of each of the components; of full attention first."""

    def pin(self, prefixes: Prefixes) -> list[Receipt]:
        """Pin what the plan counts on: the path to the anchor, and what the host has of the needs."""
        if self.anchor.parent is None:
            # There is nothing of a root that could leave.
            return []
        holds = prefixes.residence.holds
        receipts = [holds.acquire(HOST, 0, self.anchor)]
        for component, need in zip(self.components[1:], self.needs[1:], strict=True):
            receipts.append(holds.acquire(HOST, component.index, self.anchor, need.first))
        return receipts


class Lookups:
    """Plans lookups, and what is read after them."""

    def __init__(self, config: ReplicaConfig, prefixes: Prefixes, store: Store) -> None:
        self._prefetch_pages_max = config.prefetch_pages_max
        self._prefixes = prefixes
        self._store = store

    def plan(
        self, place: Place, nodes: list[Node], tokens: bytes, *, heeds: bool = True
    ) -> LookupPlan | None:
        """Return what a prefetch of `tokens` asks for, or None if it could bring nothing.

        `nodes` hold what of them is in the tree. It `heeds` what is remembered as missing in the store.
        """
        prefixes, tree, store = self._prefixes, self._prefixes.tree, self._store
        step = tree.page_bytes
        _, best, last_host = reach(prefixes.needs, nodes)
        root = prefixes.root(place)
        anchor = next((node for node in nodes if node.end == last_host), root)
        if nodes and nodes[-1] is not anchor:
            # What lies beyond is on the device alone. Its backup is on its way, or had no room.
            return None
        wanted = tokens[anchor.end * step :]
        last = anchor.end + tree.whole_pages(wanted)
        pages = min(last - anchor.end, self._prefetch_pages_max)
        # Hashing is a good part of the cost of a prefetch that finds nothing: the bound comes first.
        wanted = wanted[: pages * step]
        before = tree.keys(anchor)[-1]
        keys = prefixes.page_keys(before, wanted)
        if heeds:
            keys = store.before_misses(prefixes.components[0].pool, keys)
        end = anchor.end + len(keys)
        components, floor = prefixes.components, best
        if end <= floor:
            return None
        for component in components[1:]:
            first = component.needed_from(floor + 1)
            if 0 < first < anchor.end:
                prefixes.cut(anchor, first)
        path = anchor.path_down()
        needs = [Need(components[0].pool, anchor.end, tuple(keys))]
        needs += [self._need(each, path, keys, floor, heeds=heeds) for each in components[1:]]
        asked = wanted[: len(keys) * step]
        return LookupPlan(anchor, floor, asked, components, tuple(needs))

    def room_for(self, operation: Prefetch, length: int) -> int:
        """Return the longest length, up to `length`, that host memory has room for."""
        residence = self._prefixes.residence
        available = [residence.available(HOST, each.index) for each in self._prefixes.components]
        room = operation.anchor.end - operation.floor + available[0]
        fits = length if length <= room else max(0, room)
        if len(operation.components) == 1:
            return fits
        others = [
            (_missing_by_end(each, need, operation.floor + fits), available[each.index])
            for each, need in zip(operation.components[1:], operation.needs[1:], strict=True)
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
        for component, need in zip(operation.components, operation.needs, strict=True):
            positions = range(max(need.first, component.needed_from(end)), end)
            held = need.on_host
            wanted.append([each for each in positions if each not in held] if held else positions)
        return wanted

    def _need(
        self,
        component: Component,
        path: list[Node],
        keys: list[bytes],
        floor: int,
        *,
        heeds: bool,
    ) -> Need:
        """Return what a component needs for any length beyond `floor`.

        With `heeds` it leaves out what is remembered as unreadable.
        """
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
        # A need that begins beyond the path leaves out the first of what continues it.
        asked += keys[max(0, first - (path[-1].end if path else 0)) :]
        missed, pool = self._store.is_missed, component.pool
        if heeds:
            asked = [b"" if missed(pool, key) else key for key in asked]
        return Need(pool, first, tuple(asked), component.span, frozenset(held))


def _missing_by_end(component: Component, need: Need, last: int) -> Callable[[int], int]:
    """Return a function that says how many objects an end up to `last` needs and the host lacks."""
    first, held = need.first, need.on_host
    before = [0, *accumulate(position not in held for position in range(first, last))]

    def missing(end: int) -> int:
        start = max(first, component.needed_from(end))
        return before[end - first] - before[start - first] if end > start else 0

    return missing
