"""A node of the prefix tree: a run of whole pages, their slots on each tier, and their refcounts."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, Protocol

from ..core.pages import PageRun
from .components import Component

DEVICE, HOST = 0, 1
"""Indices of the tiers in the lists that nodes have by tier."""

NO_PERSIST_PREFIX = "\0"
"""A namespace that begins with this text never has pages in storage, because no later run could use
them."""


class TreeIdentity(NamedTuple):
    """The identity of a tree: namespace, reset generation and weights version."""

    namespace: str
    """Separates prefixes that must not be shared: a tenant's salt, an adapter, or both."""
    generation: int = 0
    """The number of cache resets before the tree was created."""
    weights_version: str | None = None
    """The weights version named by the last reset before the tree was created; None if there was none.
    """

    @property
    def outlives(self) -> bool:
        """Whether a later run of the cache can find the stored pages of this tree and may use them."""
        if self.namespace.startswith(NO_PERSIST_PREFIX):
            return False
        return not self.generation or self.weights_version is not None


class StoreTime(NamedTuple):
    """A point in the life of a store: pages written to it so far, and agreed time."""

    written: int
    """Pages that the group had written to the store by this point."""
    agreed_ms: int


class OperationMark(Protocol):
    """An operation in flight that reads or fills pages of nodes, and is in their `marks`."""

    id: int

    def was_split(self, lower: "Node", upper: "Node") -> None:
        """Update the operation after a split: the first pages of `lower` now belong to `upper`."""
        ...

    def is_to_fill(self, node: "Node", tier: int, component: int) -> bool:
        """Return whether this operation fills the node's pages of a component on a tier."""
        ...


UNMARKED: frozenset[OperationMark] = frozenset()


@cache
def not_held(components: int) -> tuple[list[int], list[int]]:
    """Return zero refcounts, shared by all nodes without locks or pins to save memory."""
    return [0] * components, [0] * components


CHILDLESS: "dict[bytes, Node]" = {}
"""The empty children dict, shared by all nodes without children."""


class Node:
    """A run of whole pages in the prefix tree. Lengths and positions are in pages.

    Most nodes are leaves without locks or pins. These share empty containers to save memory.
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
        """The tokens of the run as bytes; a `bytearray` once the node has been merged."""
        self.first = b""
        """The tokens of the node's first page, as bytes: its key in the parent's `children`."""
        self.width = width
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + width
        """The position after the node's last page. Constant, because a split keeps this node as the
        lower half."""
        self.children = CHILDLESS
        self.values: tuple[list[PageRun | None], list[PageRun | None]] = (
            [None] * components,
            [None] * components,
        )
        """By tier and component: the node's pages, or None (a tombstone)."""
        self.held = not_held(components)
        """By tier and component: the node's refcount of device locks or host pins; see `RefCounts`."""
        self.hold_count = 0
        """The sum of all locks and pins in `held`."""
        self.begins = 0
        """Number of locks and pins that begin at this node. Those of full attention are not counted."""
        self.ends = 0
        """Number of locks, pins, backlog entries and other references that end at this node."""
        self.there = 0
        """Bitmap of the components of which the node has pages: bit `tier * components + component`."""
        self.occupied_children = [0, 0]
        """By tier: the number of children that have full-attention pages on the tier."""
        self.last_access = 0
        """The time of the last use, in the replica's logical clock."""
        self.hits = 0
        """How many requests have found the node cached."""
        self.is_match_end = False
        """Whether matches may end at this node in a model with windows or recurrent states.

        True if a prompt or turn ended here, or prompts diverge here.
        """
        self.priority = 0
        """The highest priority of the requests that used the node."""
        self.keys: list[bytes] | None = None
        self.saved_at = -1
        """Value of `last_access` when the node was last backed up for eviction (write-back); -1 if
        never."""
        self.persisted: frozenset[int] = frozenset()
        """Indices of the components whose pages the store is known to have on every rank.

        The record is for the store with number `store`; another store may lack the pages.
        """
        self.place: TreeIdentity = parent.place if parent is not None else TreeIdentity("")
        """The tree that the node is in."""
        self.used_ms = 0
        """Agreed time of the last use, in ms; 0 if the ranks had not agreed on a time yet."""
        self.store = 0
        """Which store `persisted` refers to, numbered from 1 in the order in which stores were
        attached."""
        self.stored_at: StoreTime | None = None
        """The earliest store time (pages written, agreed time) recorded for the node's pages or for
        pages before them in the prefix. None if the store was never known to have the node's pages.

        The record is for the store with number `store`.
        """
        self.marks = UNMARKED
        """Operations in flight that read or fill pages of this node."""

    @property
    def history(self) -> tuple[object, ...]:
        """Last uses, backup and store number of the node. Nodes that differ in these are not merged."""
        return self.last_access, self.used_ms, self.is_saved, self.store

    @property
    def is_saved(self) -> bool:
        """Whether, under write-back, the node was backed up for eviction since its last use."""
        return self.saved_at == self.last_access

    def pages(self, tier: int, component: int = 0) -> PageRun | None:
        """Return the node's pages of one component on one tier, or None."""
        return self.values[tier][component]

    def has(self, component: int) -> bool:
        """Return whether some tier has the pages of one component."""
        return self.values[0][component] is not None or self.values[1][component] is not None

    def is_to_have(self, tier: int, component: int) -> bool:
        """Return whether a copy in flight fills the pages of one component on one tier."""
        return any(mark.is_to_fill(self, tier, component) for mark in self.marks)

    def is_held_on(self, tier: int) -> bool:
        """Return whether anything locks (device) or pins (host) the node."""
        # Checking full attention suffices, because a lock or pin of any component also holds full
        # attention.
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
    """Yield, deepest first, the nodes that a match ending at `last` needs for a component."""
    start = component.needed_from(last.end)
    for node in last.path():
        if node.end <= start:
            return
        yield node


def covered(last: Node) -> int:
    """Return up to which position the full attention of a path is on the host or being copied there.

    `last` is the last node of the path.
    """
    end = last.end
    for node in last.path():
        if node.values[HOST][0] is not None:
            break
        if not node.is_to_have(HOST, 0):
            end = node.start
    return end
