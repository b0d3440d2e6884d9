"""Named pins: prefixes that stay cached until a deadline, regardless of other demand for memory.

A pin keeps in host memory the pages that a match at the pin's end needs, and locks them on the device
until the host has all of them. Deadlines are in agreed time (rule R14), so they pass in the same step
on every rank.
"""

from dataclasses import dataclass, field

from ...errors import UsageError
from .core.deadlines import AgreedDeadlines
from .core.replica_parts import ReplicaParts
from .operations.backing_up import BackingUp
from .operations.requests import Requests, require_name
from .tree.matching import Missing, lacking, reach
from .tree.node import DEVICE, HOST, Node, TreeIdentity
from .tree.prefixes import Prefixes
from .tree.ref_counts import LockHandle


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """One pinned prefix."""

    name: str
    node: Node
    lock_handles: list[LockHandle]
    pages: tuple[int, ...]
    """By component: the number of pages that the pin keeps."""
    ttl_ms: int
    locks: list[LockHandle] = field(default_factory=list[LockHandle])
    """Locks on the pin's device pages, while host memory lacks some of the prefix."""
    awaits: Node | None = None
    """The node whose copy to host memory the pin awaits, or None if nothing is missing."""


class Pinning:
    """The named pins. Only the pins that end in a step add to the step's cost (rule R15)."""

    def __init__(
        self, basis: ReplicaParts, prefixes: Prefixes, requests: Requests, backing_up: BackingUp
    ) -> None:
        self._config = basis.config
        self._clock = basis.clock
        self._prefixes = prefixes
        self._allocator = prefixes.allocator
        self._requests = requests
        self._backing_up = backing_up
        self._journal = basis.journal
        self.pins: dict[str, PinnedPrefix] = {}
        self._kept = tuple([0] * len(prefixes.components) for _ in (DEVICE, HOST))
        """By tier and component: the number of pages that all pins keep."""
        self._awaiting: dict[Node, dict[str, PinnedPrefix]] = {}
        """By node that host memory lacks: the pins, by name, that lock device pages until the node has
        been copied."""
        self._came: list[PinnedPrefix] = []
        """Pins whose awaited node was copied to host memory since the last `look_after`."""
        self._deadlines: AgreedDeadlines[PinnedPrefix] = AgreedDeadlines()
        prefixes.allocator.came_to_host = self._came_to_host

    def pin(self, name: str, place: TreeIdentity, tokens: bytes, ttl_ms: int) -> int:
        """Pin the cached prefix of `tokens`; return its length in tokens.

        Returns 0, and makes no pin, if nothing is cached or the bound on pinned pages would be
        exceeded. Pages missing in host memory are copied there, under any write policy.
        """
        prefixes, allocator = self._prefixes, self._allocator
        require_name("pin", name)
        if name in self.pins:
            raise UsageError(f"there is a pin {name!r} already; unpin it first")
        self._requests.digest_tokens("pin", name, tokens)
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
        pin = PinnedPrefix(name, node, allocator.hold(HOST, node), pages, ttl_ms)
        self._count(HOST, pin, 1)
        if locks:
            pin.locks = allocator.hold(DEVICE, node)
            self._count(DEVICE, pin, 1)
            allocator.stay(node, DEVICE)
            self._backing_up.write_through(node)
            self._await(pin)
        self.pins[name] = pin
        self._deadlines.set(pin, ttl_ms, self._clock.agreed_ms)
        self._journal.record("pin", name, node.id, ttl_ms)
        return best * self._config.page_tokens

    def unpin(self, name: str) -> bool:
        """Remove a pin; return False if there is no such pin or it has expired."""
        pin = self.pins.pop(name, None)
        if pin is None:
            return False
        self._journal.record("unpin", name)
        self._release(pin.lock_handles)
        self._count(HOST, pin, -1)
        self._leave_device(pin)
        self._allocator.prune(pin.node)
        self._deadlines.drop(pin)
        return True

    def drop_all(self) -> None:
        """Remove every pin, because after a cache reset no request can match their prefixes."""
        for name in list(self.pins):
            self.unpin(name)

    def look_after(self) -> None:
        """End expired pins, and release device locks of pins that are fully in host memory."""
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

    def _await(self, pin: PinnedPrefix) -> None:
        """Let a pin wait for its deepest node that the host lacks; if none, release device locks.

        Backups go from the top down, so the deepest missing node comes last.
        """
        missing = self._lacking(pin.node)
        if not missing:
            self._leave_device(pin)
            return
        pin.awaits, _ = missing[-1]
        pin.awaits.ends += 1
        self._awaiting.setdefault(pin.awaits, {})[pin.name] = pin

    def _is_kept(self, pin: PinnedPrefix) -> bool:
        return self.pins.get(pin.name) is pin

    def _leave_device(self, pin: PinnedPrefix) -> None:
        if pin.awaits is not None:
            awaiting = self._awaiting[pin.awaits]
            pin.awaits.ends -= 1
            self._allocator.changed[pin.awaits] = None
            del awaiting[pin.name]
            if not awaiting:
                del self._awaiting[pin.awaits]
        if pin.locks:
            self._release(pin.locks)
            self._count(DEVICE, pin, -1)

    def _has_room(self, tier: int, pages: tuple[int, ...]) -> bool:
        """Return whether pins may keep `pages` more pages (by component) within their bounds."""
        config = self._config
        most = [capacity // 2 for capacity in config.pool_pages(tier)]
        if tier == HOST:
            if not config.host_pages:
                return True
            most[0] = config.pinned_pages_max
        kept = self._kept[tier]
        return all(old + new <= bound for old, new, bound in zip(kept, pages, most, strict=True))

    def _count(self, tier: int, pin: PinnedPrefix, sign: int) -> None:
        for component, pages in enumerate(pin.pages):
            self._kept[tier][component] += sign * pages

    def _lacking(self, node: Node) -> list[Missing]:
        return lacking(self._prefixes.components, node, HOST)

    def _release(self, lock_handles: list[LockHandle]) -> None:
        self._allocator.release(lock_handles)
        lock_handles.clear()
