"""Pinning: prefixes that stay cached until a deadline, whatever else needs room.

A pin keeps what a match at its end needs in host memory, and on the device as long as some of it is
only there. Deadlines are in agreed time (rule R14), so they pass in the same step
everywhere.
"""

from dataclasses import dataclass, field

from ...errors import UsageError
from .core.basis import Basis
from .core.deadlines import AgreedDeadlines
from .operations.backing_up import BackingUp
from .operations.requests import Requests, require_name
from .tree.holds import Receipt
from .tree.matching import Missing, lacking, reach
from .tree.node import DEVICE, HOST, Node, Place
from .tree.prefixes import Prefixes


@dataclass(slots=True, eq=False)
class Pin:
    """One prefix that is kept."""

    name: str
    node: Node
    receipts: list[Receipt]
    pages: tuple[int, ...]
    """By component: how many pages it keeps."""
    ttl_ms: int
    locks: list[Receipt] = field(default_factory=list[Receipt])
    """Locks on its device pages, while host memory lacks some of the prefix."""
    awaits: Node | None = None
    """The node whose coming to host memory is awaited, while some of the prefix is not there."""


class Pinning:
    """The pins by name. A step costs what ends in it, however many there are (rule R15)."""

    def __init__(
        self, basis: Basis, prefixes: Prefixes, requests: Requests, backing_up: BackingUp
    ) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._prefixes = prefixes
        self._residence = prefixes.residence
        self._requests = requests
        self._backing_up = backing_up
        self._journal = basis.journal
        self.pins: dict[str, Pin] = {}
        self._kept = tuple([0] * len(prefixes.components) for _ in (DEVICE, HOST))
        """By tier and component: how many pages the pins keep there."""
        self._awaiting: dict[Node, dict[str, Pin]] = {}
        """Pins that lock device pages as well, by the node that each awaits in host memory."""
        self._came: list[Pin] = []
        """Pins whose awaited node has come to host memory since `look_after` was last called."""
        self._deadlines: AgreedDeadlines[Pin] = AgreedDeadlines()
        prefixes.residence.came_to_host = self._came_to_host

    def pin(self, name: str, place: Place, tokens: bytes, ttl_ms: int) -> int:
        """Keep what is cached of `tokens`; return how many tokens those are.

        Returns 0, and makes no pin, where nothing is cached or the bound on pinned pages would be
        passed. What host memory lacks is copied there, whatever the write policy.
        """
        prefixes, residence = self._prefixes, self._residence
        require_name("pin", name)
        if name in self.pins:
            raise UsageError(f"there is a pin {name!r} already; unpin it first")
        self._requests.witness_tokens("pin", name, tokens)
        root = prefixes.root(place)
        nodes = prefixes.walk_to(root, tokens)
        _, best, _ = reach(prefixes.needs, nodes)
        node = next((each for each in nodes if each.end == best), None)
        if node is None:
            prefixes.drop_root_if_unused(root)
            return 0
        prefixes.cut_for(node)
        pages = tuple(
            best - each.needed_from(best) if each.per_page else 1 for each in prefixes.components
        )
        locks = bool(self._lacking(node))
        if not self._has_room(HOST, pages) or (locks and not self._has_room(DEVICE, pages)):
            return 0
        pin = Pin(name, node, residence.hold(HOST, node), pages, ttl_ms)
        self._count(HOST, pin, 1)
        if locks:
            pin.locks = residence.hold(DEVICE, node)
            self._count(DEVICE, pin, 1)
            residence.stay(node, DEVICE)
            self._backing_up.write_through(node)
            self._await(pin)
        self.pins[name] = pin
        self._deadlines.set(pin, ttl_ms, self._clock.agreed_ms)
        self._journal.record("pin", name, node.id, ttl_ms)
        return best * self._config.page_tokens

    def unpin(self, name: str) -> bool:
        """Let go of a prefix; False if there is no pin of that name, or its time is over."""
        pin = self.pins.pop(name, None)
        if pin is None:
            return False
        self._journal.record("unpin", name)
        self._release(pin.receipts)
        self._count(HOST, pin, -1)
        self._leave_device(pin)
        self._residence.prune(pin.node)
        self._deadlines.drop(pin)
        return True

    def drop_all(self) -> None:
        """Let go of every pin: what they keep can be matched no more."""
        for name in list(self.pins):
            self.unpin(name)

    def look_after(self) -> None:
        """End pins whose deadline has passed, and locks of those that host memory has all of by now."""
        for pin in self._deadlines.passed(self._clock.agreed_ms):
            self.unpin(pin.name)
        came, self._came = self._came, []
        for pin in filter(self._is_kept, came):
            self._await(pin)

    def _came_to_host(self, node: Node) -> None:
        for pin in self._awaiting.pop(node, {}).values():
            pin.awaits = None
            node.ends -= 1
            self._came.append(pin)

    def _await(self, pin: Pin) -> None:
        """Let a pin await what host memory lacks of it; release its locks if it lacks nothing.

        The last to come is awaited: backups go from the top down.
        """
        missing = self._lacking(pin.node)
        if not missing:
            self._leave_device(pin)
            return
        pin.awaits, _ = missing[-1]
        pin.awaits.ends += 1
        self._awaiting.setdefault(pin.awaits, {})[pin.name] = pin

    def _is_kept(self, pin: Pin) -> bool:
        return self.pins.get(pin.name) is pin

    def _leave_device(self, pin: Pin) -> None:
        if pin.awaits is not None:
            awaiting = self._awaiting[pin.awaits]
            pin.awaits.ends -= 1
            self._residence.changed[pin.awaits] = None
            del awaiting[pin.name]
            if not awaiting:
                del self._awaiting[pin.awaits]
        if pin.locks:
            self._release(pin.locks)
            self._count(DEVICE, pin, -1)

    def _has_room(self, tier: int, pages: tuple[int, ...]) -> bool:
        """Say whether pins may keep so many more pages: half of each pool, unless a bound says so."""
        config = self._config
        most = [capacity // 2 for capacity in config.pool_pages(tier)]
        if tier == HOST:
            if not config.host_pages:
                return True
            most[0] = config.pinned_pages_max
        kept = self._kept[tier]
        return all(old + new <= bound for old, new, bound in zip(kept, pages, most, strict=True))

    def _count(self, tier: int, pin: Pin, sign: int) -> None:
        for component, pages in enumerate(pin.pages):
            self._kept[tier][component] += sign * pages

    def _lacking(self, node: Node) -> list[Missing]:
        return lacking(self._prefixes.components, node, HOST)

    def _release(self, receipts: list[Receipt]) -> None:
        self._residence.release(receipts)
        receipts.clear()
