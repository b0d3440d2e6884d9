"""What a prefetch asks storage for, and what it then reads.

Positions are pages from the start of the prefix. Full attention is asked for from `last_host_node`
on; of a component that a match needs only a part of, every object that some length beyond
`best_match_node` could need, but those that host memory has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..orders import Need
from .components.base import Component
from .holds import Receipt
from .matching import reach
from .operations import Prefetch
from .state import ReplicaState
from .tree import HOST, Node


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """What a prefetch is to ask for."""

    anchor: Node
    floor: int
    tokens: bytes
    """The tokens of the pages of full attention that are asked for."""
    needs: tuple[Need, ...]

    def pin(self, state: ReplicaState) -> list[Receipt]:
        """Pin what the plan counts on: the path to the anchor, and what is held of the needs."""
        if self.anchor.parent is None:
            # There is nothing of a root that could leave.
            return []
        holds = state.residence.holds
        receipts = [holds.acquire(HOST, 0, self.anchor)]
        for component, need in zip(state.components[1:], self.needs[1:], strict=True):
            receipts.append(holds.acquire(HOST, component.index, self.anchor, need.first))
        return receipts


def plan_lookup(state: ReplicaState, root: Node, tokens: bytes) -> LookupPlan | None:
    """Return what a prefetch of `tokens` asks for, or None if it could bring nothing."""
    step = state.tree.page_bytes
    nodes = state.walk_to(root, tokens)
    _, best, last_host = reach(state.needs, nodes)
    anchor = next((node for node in nodes if node.end == last_host), root)
    if nodes and nodes[-1] is not anchor:
        # What lies beyond is on the device alone. Its backup is on its way, or had no room.
        return None
    wanted = tokens[anchor.end * step :]
    pages = min(state.tree.whole_pages(wanted), state.config.prefetch_pages_max)
    # Hashing is a good part of the cost of a prefetch that finds nothing, so the bound comes first.
    wanted = wanted[: pages * step]
    keys = _offered(state, state.page_keys(state.tree.keys(anchor)[-1], wanted))
    end = anchor.end + len(keys)
    if end <= best:
        return None
    others = state.components[1:]
    for component in others:
        first = component.needed_from(best + 1)
        if 0 < first < anchor.end:
            state.cut(anchor, first)
    path = anchor.path_down()
    needs = [Need(state.components[0].pool, anchor.end, tuple(keys))]
    needs += [_need(state, component, path, keys, best) for component in others]
    return LookupPlan(anchor, best, wanted[: len(keys) * step], tuple(needs))


def room_for(state: ReplicaState, operation: Prefetch, length: int) -> int:
    """Return the longest length, up to `length`, that host memory has room for."""
    assert operation.anchor is not None
    room = operation.anchor.end - operation.floor + state.residence.available(HOST, 0)
    fits = length if length <= room else max(0, room)
    if len(state.components) == 1:
        return fits
    others = [
        (_missing_by_end(each, need, operation.floor + fits), _available(state, each))
        for each, need in zip(state.components[1:], operation.needs[1:], strict=True)
    ]
    while fits:
        short = max(missing(operation.floor + fits) - room for missing, room in others)
        if short <= 0:
            break
        # Each page less needs at most one object less, so no length in between fits.
        fits = max(0, fits - short)
    return fits


def _available(state: ReplicaState, component: Component) -> int:
    return state.residence.available(HOST, component.index)


def _missing_by_end(component: Component, need: Need, last: int) -> Callable[[int], int]:
    """Return what says, of any end up to `last`, how many objects it needs that are not held."""
    first, held = need.first, need.held
    before = [0, *accumulate(position not in held for position in range(first, last))]

    def missing(end: int) -> int:
        start = max(first, component.needed_from(end))
        return before[end - first] - before[start - first] if end > start else 0

    return missing


def wanted_positions(state: ReplicaState, operation: Prefetch, length: int) -> list[Sequence[int]]:
    """Return by component the positions of what has to be read for a length."""
    end = operation.floor + length
    wanted: list[Sequence[int]] = []
    for component in state.components:
        need = operation.needs[component.index]
        positions = range(max(need.first, component.needed_from(end)), end)
        held = need.held
        wanted.append([each for each in positions if each not in held] if held else positions)
    return wanted


def _need(
    state: ReplicaState, component: Component, path: list[Node], keys: list[bytes], floor: int
) -> Need:
    """Return what a component needs for any length beyond `floor`."""
    first = component.needed_from(floor + 1)
    held: set[int] = set()
    asked: list[bytes] = []
    for node in path:
        if node.end <= first:
            continue
        if node.values[HOST][component.index] is not None:
            held |= set(range(node.start, node.end) if component.per_page else (node.end - 1,))
        node_keys = state.tree.keys(node)
        asked += node_keys[max(0, first - node.start) :]
    asked += keys
    offered = tuple(b"" if _is_missed(state, component.pool, key) else key for key in asked)
    return Need(component.pool, first, offered, component.span, frozenset(held))


def _offered(state: ReplicaState, keys: list[bytes]) -> list[bytes]:
    """Return the leading keys of full attention that are not remembered as unreadable."""
    if state.misses:
        pool = state.components[0].pool
        for index, key in enumerate(keys):
            if _is_missed(state, pool, key):
                return keys[:index]
    return keys


def _is_missed(state: ReplicaState, pool: str, key: bytes) -> bool:
    return state.misses.get((pool, key), 0) > state.time_ms
