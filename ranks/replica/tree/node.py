"""A node of the prefix tree: a run of whole pages, where they are, and who uses them."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, Protocol

from ..core.pages import PageRun
from .components import Component

DEVICE, HOST = 0, 1
"""The tiers that the tree knows, as indices."""

PASSING = "\0"
"""What a namespace begins with that is worth nothing after this life of the cache."""


class Place(NamedTuple):
    """Names the tree that a prefix is in."""

    namespace: str
    """Keeps apart what must not be shared: a tenant's salt, an adapter, or both."""
    generation: int = 0
    """How often the cache had been reset when the tree began."""
    weights_version: str | None = None
    """The version that this reset named; None if it named none, and before the first reset."""

    @property
    def outlives(self) -> bool:
        """Whether another life of the cache can find what storage has of it, and wants to."""
        if self.namespace.startswith(PASSING):
            return False
        return not self.generation or self.weights_version is not None


class StoreTime(NamedTuple):
    """A point in the life of a store, as a group sees it."""

    written: int
    """Pages that the group had written by then."""
    agreed_ms: int


class Mark(Protocol):
    """An operation in flight that reads or fills pages of nodes, and is marked on them."""

    id: int

    def was_split(self, lower: "Node", upper: "Node") -> None:
        """Take note that the first pages of `lower`, which has this mark, are `upper`'s now."""
        ...

    def is_to_fill(self, node: "Node", tier: int, component: int) -> bool:
        """Say whether the node is to have its pages of a component on a tier from this."""
        ...


UNMARKED: frozenset[Mark] = frozenset()


@cache
def not_held(components: int) -> tuple[list[int], list[int]]:
    """Return the counts of all nodes that nothing holds, which is nearly every node."""
    return [0] * components, [0] * components


CHILDLESS: "dict[bytes, Node]" = {}
"""The children of all nodes that have none."""


class Node:
    """A run of pages; see the module. Lengths and positions are in pages.

    Most nodes are leaves that nothing holds: they share the containers that are empty.
    """

    __slots__ = (
        "begins",
        "children",
        "end",
        "ends",
        "first",
        "held",
        "hits",
        "hold_count",
        "id",
        "is_match_end",
        "keys",
        "last_access",
        "marks",
        "occupied_children",
        "parent",
        "persisted",
        "place",
        "priority",
        "saved_at",
        "start",
        "store",
        "stored_at",
        "there",
        "tokens",
        "used_ms",
        "values",
        "width",
    )

    def __init__(
        self, number: int, parent: "Node | None", tokens: bytes, width: int, components: int
    ) -> None:
        self.id = number
        self.parent = parent
        self.tokens: bytes | bytearray = tokens
        """The tokens of its pages; a `bytearray` once it has grown."""
        self.first = b""
        """The tokens of its first page, by which its parent finds it."""
        self.width = width
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + width
        """The position after its last page, for good: a split keeps it as the lower half."""
        self.children = CHILDLESS
        self.values: tuple[list[PageRun | None], list[PageRun | None]] = (
            [None] * components,
            [None] * components,
        )
        """By tier and component: the pages that hold the content, or None (a tombstone)."""
        self.held = not_held(components)
        """By tier and component: device locks and host pins, as `holds.Holds` counts them."""
        self.hold_count = 0
        """The sum of all locks and pins in `held`."""
        self.begins = 0
        """How many locks and pins begin with it, and not above; those of full attention never do."""
        self.ends = 0
        """How many locks and pins end with it, and not below; and whatever else refers to it."""
        self.there = 0
        """Which of the values are there: the bit `tier * components + component` of each."""
        self.occupied_children = [0, 0]
        """By tier: how many children have full-attention pages there."""
        self.last_access = 0
        """When it was last used, in the replica's logical clock."""
        self.hits = 0
        """How many requests have found it cached."""
        self.is_match_end = False
        """Whether a prompt or a turn ended with it, or prompts part there: matches may end here. Kept
        for models that need more than full attention for a match."""
        self.priority = 0
        """The highest priority of the requests that used it."""
        self.keys: list[bytes] | None = None
        self.saved_at = -1
        """Its last use when, under write-back, it was backed up to leave the device."""
        self.persisted: frozenset[int] = frozenset()
        """The components whose pages the store `store` has on every rank, as far as is known."""
        self.place: Place = parent.place if parent is not None else Place("")
        """Which tree it is in."""
        self.used_ms = 0
        """When it was last used, in agreed time; 0 while none has been agreed on."""
        self.store = 0
        """The number of the store that `persisted` is about."""
        self.stored_at: StoreTime | None = None
        """When `store` was seen to have its pages, or those that they continue; None if never."""
        self.marks = UNMARKED
        """Operations in flight that read or fill pages of this node."""

    @property
    def history(self) -> tuple[object, ...]:
        """Its uses, backups and writes, on which it depends when it leaves and where it goes."""
        return self.last_access, self.used_ms, self.is_saved, self.store

    @property
    def is_saved(self) -> bool:
        """Whether, under write-back, it was backed up to leave the device since its last use."""
        return self.saved_at == self.last_access

    def pages(self, tier: int, component: int = 0) -> PageRun | None:
        """Return the pages of one component on one tier, or None."""
        return self.values[tier][component]

    def has(self, component: int) -> bool:
        """Say whether some tier has the pages of one component."""
        return self.values[0][component] is not None or self.values[1][component] is not None

    def is_to_have(self, tier: int, component: int) -> bool:
        """Say whether a copy in flight fills the pages of one component on one tier."""
        return any(mark.is_to_fill(self, tier, component) for mark in self.marks)

    def is_held_on(self, tier: int) -> bool:
        """Say whether anything locks (device) or pins (host) the node."""
        # Whoever holds any component holds full attention.
        return self.held[tier][0] > 0

    def path(self) -> Iterator["Node"]:
        """Yield this node and its ancestors below the root, deepest first."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_down(self) -> "list[Node]":
        """Return this node and its ancestors below the root, from the top down."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def needed(component: Component, last: Node) -> Iterator[Node]:
    """Yield the nodes, deepest first, whose value of a component a match ending at `last` needs."""
    start = component.needed_from(last.end)
    for node in last.path():
        if node.end <= start:
            return
        yield node


def covered(last: Node) -> int:
    """Return the position up to which the path to `last` is on the host, or on its way there."""
    end = last.end
    for node in last.path():
        if node.values[HOST][0] is not None:
            break
        if not node.is_to_have(HOST, 0):
            end = node.start
    return end
