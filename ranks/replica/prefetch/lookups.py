"""Lookups: the objects that a prefetch queries in storage, and those that it then reads.

Positions are pages from the start of the prefix. Full attention is queried from `last_host_node` on.
For each other component, a lookup names every object that host memory lacks and that a match at any
length beyond `best_match_node` could need.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from ...protocol.orders import Need
from ..core.misses import Sought
from ..core.replica_parts import ReplicaParts
from ..operations.kinds import Prefetch
from ..operations.requests import Request
from ..operations.store import Store
from ..tree.components import Component
from ..tree.matching import reach
from ..tree.node import HOST, Node
from ..tree.prefixes import Prefixes
from ..tree.ref_counts import LockHandle
from ..tree.tokens import page_keys


class LookupPlanner:
    """Plans the lookups of prefetches and the reads that follow them."""

    def __init__(self, basis: ReplicaParts, prefixes: Prefixes, store: Store) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._prefixes = prefixes
        self._store = store

    def plan(
        self, request: Request, nodes: list[Node], tokens: bytes, source: str
    ) -> Prefetch | None:
        """Plan a prefetch that could lengthen the cached part of `tokens`, or return None.

        `nodes` are the nodes of the cached part. The path to the anchor (`last_host_node`) and the
        needed host pages are pinned. A prefetch from the store skips objects remembered as missing in
        the store. A prefetch from another group (`source`) does not.
        """
        prefixes, tree, store = self._prefixes, self._prefixes.tree, self._store
        step, heeds = tree.page_bytes, not source
        _, best, last_host = reach(prefixes.needs, nodes)
        root = prefixes.root(request.place)
        anchor = next((node for node in nodes if node.end == last_host), root)
        if nodes and nodes[-1] is not anchor:
            # Do not prefetch while cached pages beyond the anchor are only on the device. Their backup
            # is in flight, or host memory had no room for it.
            return None
        wanted = tokens[anchor.end * step :]
        pages = min(tree.whole_pages(wanted), self._config.prefetch_pages_max)
        # Bound the tokens before they are hashed, because hashing is the main cost of a prefetch that
        # finds nothing.
        keys = page_keys(tree.keys(anchor)[-1], wanted[: pages * step], tree.page_tokens)
        request.sought = Sought(anchor.end, keys, failed=request.sought.failed)
        components = prefixes.components
        if heeds:
            keys = store.before_misses(components[0].pool, keys)
        if anchor.end + len(keys) <= best:
            return None
        for component in components[1:]:
            first = component.needed_from(best + 1)
            if 0 < first < anchor.end:
                prefixes.cut(anchor, first)
        path = anchor.path_down()
        needs = [Need(components[0].pool, anchor.end, tuple(keys))]
        needs += [self._need(each, path, keys, best, heeds=heeds) for each in components[1:]]
        lock_handles: list[LockHandle] = []
        # Skip a root, which has no pages to pin.
        for component, need in zip(components, needs, strict=True) if path else ():
            first = need.first if component.index else 0
            lock_handles.append(
                prefixes.allocator.ref_counts.acquire(HOST, component.index, anchor, first)
            )
        return Prefetch(
            request=request.id,
            anchor=anchor,
            floor=best,
            tokens=wanted[: len(keys) * step],
            components=components,
            needs=tuple(needs),
            source=source,
            waits_since_ms=self._clock.agreed_ms,
            lock_handles=lock_handles,
        )

    def room_for(self, operation: Prefetch, length: int) -> int:
        """Return the longest length of a prefetch, at most `length`, for which the host has room.

        Lengths are in pages, counted from the floor (end of `best_match_node`).
        """
        allocator = self._prefixes.allocator
        available = [allocator.available(HOST, each.index) for each in self._prefixes.components]
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
            # `short` is the number of objects that do not fit. Shortening the prefetch by one page
            # saves at most one object, so the length must fall by at least `short` pages.
            fits = max(0, fits - short)
        return fits

    def positions(self, operation: Prefetch, length: int) -> list[Sequence[int]]:
        """Return, by component, the positions of the pages to read in order to restore `length` pages.

        `length` counts from the floor, the end of `best_match_node`.
        """
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
        """Return the objects that a component needs for a match that ends anywhere after `floor`.

        If `heeds`, objects remembered as unreadable get an empty key, so that they are not queried.
        """
        first = component.needed_from(floor + 1)
        held: set[int] = set()
        queried: list[bytes] = []
        for node in path:
            if node.end <= first:
                continue
            if node.values[HOST][component.index] is not None:
                held |= set(range(node.start, node.end) if component.per_page else (node.end - 1,))
            node_keys = self._prefixes.tree.keys(node)
            queried += node_keys[max(0, first - node.start) :]
        # Add the keys after the cached path, from the first position that the component needs.
        queried += keys[max(0, first - (path[-1].end if path else 0)) :]
        missed, pool = self._store.is_missed, component.pool
        if heeds:
            queried = [b"" if missed(pool, key) else key for key in queried]
        return Need(pool, first, tuple(queried), component.span, frozenset(held))


def _missing_by_end(component: Component, need: Need, last: int) -> Callable[[int], int]:
    """Return a function from a match's end position to a number of missing objects.

    The function counts the objects that the match needs and the host lacks. The end position is at most
    `last`.
    """
    first, held = need.first, need.on_host
    before = [0, *accumulate(position not in held for position in range(first, last))]

    def missing(end: int) -> int:
        start = max(first, component.needed_from(end))
        return before[end - first] - before[start - first] if end > start else 0

    return missing
