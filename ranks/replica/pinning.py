"""Pinning: prefixes that stay cached until a deadline, whatever else needs room.

A pin keeps what a match at its end needs in host memory, and on the device as long as some of it is
only there. Deadlines are in agreed time (rule R14), so they pass in the same step
everywhere.
"""

from dataclasses import dataclass
from operator import add

from ...errors import UsageError
from .backing_up import BackingUp
from .holds import Receipt
from .matching import lacking, reach
from .state import ReplicaState
from .tree import DEVICE, HOST, Node, Place


@dataclass(slots=True)
class Pin:
    """One prefix that is kept."""

    node: Node
    receipts: list[Receipt]
    locks: list[Receipt]
    """Of the device, while host memory has not all of it."""
    pages: tuple[int, ...]
    """By component: how many pages it keeps."""
    ttl_ms: int
    until_ms: int
    """0 while no time has been agreed on."""


class Pinning:
    """The pins by name."""

    def __init__(self, state: ReplicaState, backing_up: BackingUp) -> None:
        self._state = state
        self._backing_up = backing_up
        self.pins: dict[str, Pin] = {}

    def pin(self, name: str, place: Place, tokens: bytes, ttl_ms: int) -> int:
        """Keep what is cached of `tokens`; return how many tokens those are.

        0, and no pin, where nothing is cached or the bound on pinned pages would be passed. What
        host memory does not have is copied there, whatever the write policy.
        """
        state = self._state
        if name in self.pins:
            raise UsageError(f"there is a pin {name!r} already; unpin it first")
        state.witness_tokens("pin", name, tokens)
        root = state.root(place)
        nodes = state.walk_to(root, tokens)
        _, best, _ = reach(state.needs, nodes)
        node = next((each for each in nodes if each.end == best), None)
        if node is None:
            state.drop_root_if_unused(root)
            return 0
        state.cut_for(node)
        pages = tuple(
            best - each.needed_from(best) if each.per_page else 1 for each in state.components
        )
        locks = not self._is_on_host(node)
        if not self._has_room(HOST, pages) or (locks and not self._has_room(DEVICE, pages)):
            return 0
        until_ms = state.time_ms + ttl_ms if state.time_ms else 0
        pin = Pin(node, state.residence.hold(HOST, node), [], pages, ttl_ms, until_ms)
        if locks:
            pin.locks = state.residence.hold(DEVICE, node)
            self._backing_up.write_through(node)
        self.pins[name] = pin
        state.journal.record("pin", name, node.id, ttl_ms)
        return best * state.config.page_tokens

    def unpin(self, name: str) -> bool:
        """Let go of a prefix; False if there is no such pin, or no more."""
        pin = self.pins.pop(name, None)
        if pin is None:
            return False
        state = self._state
        state.journal.record("unpin", name)
        self._release(pin.receipts)
        self._release(pin.locks)
        state.residence.prune(pin.node)
        return True

    def drop_all(self) -> None:
        """Let go of every pin: what they keep can be matched no more."""
        for name in list(self.pins):
            self.unpin(name)

    def look_after(self) -> None:
        """Let go of prefixes whose deadline has passed, and of the device's copy of the others."""
        now_ms = self._state.time_ms
        for name, pin in list(self.pins.items()):
            pin.until_ms = pin.until_ms or now_ms + pin.ttl_ms
            if now_ms >= pin.until_ms:
                self.unpin(name)
            elif pin.locks and self._is_on_host(pin.node):
                self._release(pin.locks)

    def _has_room(self, tier: int, pages: tuple[int, ...]) -> bool:
        """Say whether pins may keep so many more pages: half of each pool, unless a bound says so."""
        config = self._state.config
        most = [capacity // 2 for capacity in config.pool_pages(tier)]
        if tier == HOST:
            if not config.host_pages:
                return True
            most[0] = config.pinned_pages_max
        for pin in self.pins.values():
            if tier == HOST or pin.locks:
                pages = tuple(map(add, pages, pin.pages))
        return all(count <= bound for count, bound in zip(pages, most, strict=True))

    def _is_on_host(self, node: Node) -> bool:
        return not lacking(self._state.components, node, HOST)

    def _release(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            self._state.residence.holds.release(receipt)
        receipts.clear()
