"""Operations in flight as every replica holds them: one class per kind.

An operation owns the pages that it fills until they settle or are freed, and holds the lock handles for
its sources and its place in the tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ....coordinator.operation import FIRST_PHASE, OperationKind, Outcome, Phase, Queue
from ....coordinator.prefetch_slots import UNBOUNDED
from ...protocol.orders import Need
from ..core.pages import PageRun, page_run
from ..tree.components import Component
from ..tree.node import DEVICE, HOST, UNMARKED, Node, StoreTime
from ..tree.ref_counts import LockHandle


class Segment(NamedTuple):
    """A node and component whose pages an operation reads or fills."""

    node: Node
    component: int


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """The common part of all kinds of operation."""

    kind: ClassVar[OperationKind]
    id: int = 0
    phase: Phase = field(init=False)
    lock_handles: list[LockHandle] = field(default_factory=list[LockHandle])
    ending: Outcome | None = None
    """The outcome of a stopped operation that waits until its I/O has ended."""

    def __post_init__(self) -> None:
        self.phase = FIRST_PHASE[self.kind]

    @property
    def is_for_store(self) -> bool:
        """Whether the operation reads from or writes to the group's store."""
        return False

    @property
    def owns_pages(self) -> bool:
        """Whether any pages belong to this operation."""
        raise NotImplementedError

    def owned_pages(self, tier: int, component: int) -> PageRun:
        """Return a copy of all pages of a component on `tier` that the operation owns."""
        raise NotImplementedError

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes that the operation refers to, possibly more than once."""
        for lock_handle in self.lock_handles:
            yield lock_handle.node


@dataclass(slots=True, eq=False, kw_only=True)
class Moving(Operation):
    """A copy or write of pages of tree nodes."""

    fills: ClassVar[int | None]
    """The tier of the operation's own pages. Nodes get these pages, except from a `Persist`."""
    queue: ClassVar[Queue]
    """The queue that holds the operation until it has ended."""
    components: Sequence[Component]
    segments: dict[Segment, PageRun] = field(default_factory=dict[Segment, PageRun])
    """The segments read or filled, each with the operation's own pages; empty for a read."""
    owned: dict[tuple[int, int], PageRun] = field(default_factory=dict[tuple[int, int], PageRun])
    """By tier and component: owned pages other than those of segments."""

    def own(self, tier: int, component: int, pages: PageRun) -> None:
        """Add pages to those that the operation owns."""
        if pages:
            self.owned.setdefault((tier, component), page_run()).extend(pages)

    def give(self, segment: Segment) -> PageRun:
        """Return the operation's pages for a segment, which the caller owns from now on."""
        pages, self.segments[segment] = self.segments[segment], page_run()
        return pages

    def disown(self, tier: int, component: int) -> PageRun:
        """Return owned pages other than those of segments; the caller owns them from now on."""
        return self.owned.pop((tier, component), page_run())

    def in_order(self) -> list[Segment]:
        """Return the segments by component and from the top of the tree down."""
        segments = list(self.segments)
        return segments if len(segments) == 1 else sorted(segments, key=_position)

    def mark(self) -> None:
        """Mark the segments' nodes with this operation."""
        mark = frozenset((self,))
        for segment in self.segments:
            node = segment.node
            # Fast path: nearly every node has no other mark.
            node.marks = node.marks | mark if node.marks else mark

    def unmark(self, changed: dict[Node, None]) -> None:
        """Remove the operation from its nodes; it keeps only its lock handles and its pages.

        `changed` collects the nodes.
        """
        fills = self.fills
        for (node, component), pages in self.segments.items():
            if self in node.marks:
                node.marks = node.marks - {self} if len(node.marks) > 1 else UNMARKED
            changed[node] = None
            if pages and fills is not None:
                self.own(fills, component, pages)
        self.segments.clear()

    def was_split(self, lower: Node, upper: Node) -> None:
        """Divide the segments of a node that was split; see `node.Mark`."""
        keeps_upper = False
        for component in self.components:
            index = component.index
            segment = Segment(lower, index)
            pages = self.segments.get(segment)
            if pages is None:
                continue
            above, below = component.split(pages, upper.width)
            if above is not None:
                self.segments[Segment(upper, index)] = above
                keeps_upper = True
            if below is None:
                del self.segments[segment]
            else:
                self.segments[segment] = below
        if not keeps_upper:
            upper.marks -= {self}

    def is_to_fill(self, node: Node, tier: int, component: int) -> bool:
        return tier == self.fills and (node, component) in self.segments

    @property
    def owns_pages(self) -> bool:
        return bool(self.owned) or any(self.segments.values())

    def owned_pages(self, tier: int, component: int) -> PageRun:
        pages = page_run(self.owned.get((tier, component), ()))
        if tier == self.fills:
            for segment, mine in self.segments.items():
                if segment.component == component:
                    pages.extend(mine)
        return pages

    def nodes(self) -> Iterator[Node]:
        yield from super(Moving, self).nodes()
        for segment in self.segments:
            yield segment.node


@dataclass(slots=True, eq=False, kw_only=True)
class Copy(Moving):
    """A copy between device and host."""

    lent: int = 0
    """The number of device pages that the engine must not change: those of the whole prefix."""
    lender: str = ""
    """The request that lends the device pages."""


@dataclass(slots=True, eq=False, kw_only=True)
class Backup(Copy):
    """A copy from device pages of nodes, or lent ones, to host pages for those nodes."""

    kind = OperationKind.BACKUP
    fills = HOST
    queue = Queue.BACKUP
    passes: bool = False
    """Whether the host pages are temporary: persisted and freed, not attached to nodes.

    Used for a path longer than host memory.
    """


@dataclass(slots=True, eq=False, kw_only=True)
class Retract(Copy):
    """A copy from device to host of all pages of a request, including unshared ones."""

    kind = OperationKind.RETRACT
    fills = HOST
    queue = Queue.BACKUP
    request: str


@dataclass(slots=True, eq=False, kw_only=True)
class LoadBack(Copy):
    """A copy from host pages of nodes to device pages for those nodes, or lent ones."""

    kind = OperationKind.LOAD_BACK
    fills = DEVICE
    queue = Queue.LOAD_BACK
    request: str


@dataclass(slots=True, eq=False, kw_only=True)
class Resume(Copy):
    """A copy from host to device of all pages of a retracted request."""

    kind = OperationKind.RESUME
    fills = DEVICE
    queue = Queue.LOAD_BACK
    request: str


Loading = LoadBack | Resume


@dataclass(slots=True, eq=False, kw_only=True)
class Persist(Moving):
    """A write of host pages to storage.

    The pages belong to nodes, which are pinned. Pages given with a segment are temporary and belong to
    the operation.
    """

    kind = OperationKind.PERSIST
    fills = HOST
    queue = Queue.PERSIST
    used_at: StoreTime | None = None
    """When the pages, or those before them, were last used; None until the write is ordered."""

    @property
    def is_for_store(self) -> bool:
        return True

    def is_to_fill(self, node: Node, tier: int, component: int) -> bool:
        """See `node.Mark`. A write fills nothing."""
        del node, tier, component
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class Serving(Moving):
    """Host pages that other groups may read. They belong to nodes, which are pinned."""

    kind = OperationKind.SERVE
    fills = None
    queue = Queue.QUIESCE
    """The only queue that this kind ever enters."""
    request: str
    last: Node | None = None
    """The last node whose full attention is served; that of its ancestors is served, too."""

    @property
    def end(self) -> int:
        """The position up to which full attention is served."""
        return 0 if self.last is None else self.last.end


class WantedPages(NamedTuple):
    """Objects of one component that a prefetch reads: positions, keys and destination pages."""

    component: int
    positions: Sequence[int]
    keys: tuple[bytes, ...]
    pages: PageRun

    def after(self, count: int) -> "WantedPages":
        """Return all but the first `count` objects."""
        component, positions, keys, pages = self
        return WantedPages(component, positions[count:], keys[count:], pages[count:])


@dataclass(slots=True, eq=False, kw_only=True)
class Prefetch(Operation):
    """A prefetch: pages of one request that may come from storage or from another group.

    Full-attention pages continue the path to `anchor` (`last_host_node`). Other components may also
    fill nodes above it. `floor` is the end of `best_match_node`; a shorter length would gain nothing.
    """

    kind = OperationKind.PREFETCH
    request: str
    anchor: Node
    floor: int
    tokens: bytes
    """The tokens of the requested full-attention pages."""
    needs: tuple[Need, ...]
    """The needs of the lookup, full attention first."""
    components: tuple[Component, ...]
    """The components to read pages of, one for each need."""
    source: str = ""
    """The group that the pages come from; empty for the store."""
    waits_since_ms: int
    """Agreed time (ms) at which the prefetch began to wait; 0 if none was agreed on."""
    prefetch_slot: int | None = None
    """The prefetch slot in the ballot, held from QUERY to TRANSFER."""
    bound: int = UNBOUNDED
    """The greatest length, from the floor, that a rank may vote for."""
    votes: int = 0
    """How many lengths have been voted on."""
    goal: int = 0
    """The position that the ranks agreed to restore.

    May lie above the anchor if only other components are missing.
    """
    wanted: tuple[WantedPages, ...] = ()
    """The objects to read, in landing order: full attention first."""
    wanted_count: int = 0
    landed: int = 0
    """How many objects have landed on every rank, by the last verdict."""
    budget: int = 0
    """Pages that count against the bound on prefetching."""
    keys: tuple[bytes, ...] = field(init=False)
    """The keys of the requested full-attention pages."""
    end: int = field(init=False)
    """The position after the last requested page."""

    def __post_init__(self) -> None:
        super(Prefetch, self).__post_init__()
        self.keys = self.needs[0].keys
        self.end = self.anchor.end + len(self.keys)

    @property
    def skips_known_misses(self) -> bool:
        """Whether missing pages are not requested again for a while; false for a group's pages."""
        return not self.source

    def assign(self, wanted: Sequence[WantedPages]) -> None:
        """Set the objects to read; the operation owns exactly their pages."""
        self.wanted = tuple(wanted)
        self.wanted_count = sum(len(each.keys) for each in wanted)

    def drop(self, count: int) -> None:
        """Drop the first `count` objects and the ownership of their pages."""
        kept: list[WantedPages] = []
        for each in self.wanted:
            if count < len(each.keys):
                kept.append(each.after(count))
            count = max(0, count - len(each.keys))
        self.assign(kept)

    def wanted_keys(self) -> list[tuple[int, bytes]]:
        """Return the component and the key of each object to read, in order."""
        return [(each.component, key) for each in self.wanted for key in each.keys]

    @property
    def is_for_store(self) -> bool:
        return not self.source

    @property
    def owns_pages(self) -> bool:
        return bool(self.wanted)

    def owned_pages(self, tier: int, component: int) -> PageRun:
        pages = page_run()
        if tier == HOST:
            for each in self.wanted:
                if each.component == component:
                    pages.extend(each.pages)
        return pages


def _position(segment: Segment) -> tuple[int, int]:
    return segment.component, segment.node.start
