"""Operations in flight as every replica holds them: one class per kind.

An operation owns the pages that it fills until they are attached to the tree or freed. Its lock handles
keep the pages that it reads, and the tree nodes that it refers to.
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
    """The fields and methods common to all kinds of operation."""

    kind: ClassVar[OperationKind]
    id: int = 0
    phase: Phase = field(init=False)
    lock_handles: list[LockHandle] = field(default_factory=list[LockHandle])
    ending: Outcome | None = None
    """Outcome of a stopped operation that waits until its I/O has ended; None for any other operation.
    """

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
    """An operation that copies, writes or serves pages of tree nodes."""

    fills: ClassVar[int | None]
    """The tier of the pages that the operation owns; None if it owns none.

    If the operation succeeds, tree nodes get these pages. Those of a `Persist` are freed instead.
    """
    queue: ClassVar[Queue]
    """The queue that holds the operation until a verdict settles it."""
    components: Sequence[Component]
    segments: dict[Segment, PageRun] = field(default_factory=dict[Segment, PageRun])
    """By segment (node, component) that the operation reads or fills: the pages for it that the
    operation owns, none if the segment is only read."""
    owned: dict[tuple[int, int], PageRun] = field(default_factory=dict[tuple[int, int], PageRun])
    """By tier and component: pages that the operation owns and that belong to no segment."""

    def own(self, tier: int, component: int, pages: PageRun) -> None:
        """Make the operation the owner of these pages, which belong to no segment (node, component)."""
        if pages:
            self.owned.setdefault((tier, component), page_run()).extend(pages)

    def give(self, segment: Segment) -> PageRun:
        """Hand over to the caller the operation's own pages for a segment (node, component)."""
        pages, self.segments[segment] = self.segments[segment], page_run()
        return pages

    def disown(self, tier: int, component: int) -> PageRun:
        """Hand over to the caller the operation's own pages that belong to no segment."""
        return self.owned.pop((tier, component), page_run())

    def in_order(self) -> list[Segment]:
        """Return the segments (node, component), sorted by component, then from the root down."""
        segments = list(self.segments)
        return segments if len(segments) == 1 else sorted(segments, key=_position)

    def mark(self) -> None:
        """Add this operation to the marks of all nodes that it reads or fills."""
        mark = frozenset((self,))
        for segment in self.segments:
            node = segment.node
            # Let all nodes whose only mark is this operation share one set, because few nodes have two
            # marks.
            node.marks = node.marks | mark if node.marks else mark

    def unmark(self, changed: dict[Node, None]) -> None:
        """Remove the operation from the marks of its nodes.

        Afterwards only its lock handles refer to nodes. The operation still owns its pages. The nodes
        whose marks changed are added to `changed`.
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
        """After `upper` was split off `lower`, assign to `upper` the operation's pages for it."""
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
    """Number of lent device pages that the engine must keep during the copy; 0 if none are lent.

    For a backup these are the pages of the whole prefix.
    """
    lender: str = ""
    """The request that lends the device pages of a backup or retract; otherwise empty."""


@dataclass(slots=True, eq=False, kw_only=True)
class Backup(Copy):
    """Backup: a copy from device pages, owned by nodes or lent, to host pages for those nodes."""

    kind = OperationKind.BACKUP
    fills = HOST
    queue = Queue.BACKUP
    passes: bool = False
    """Whether the host pages are temporary: persisted and freed, not attached to nodes.

    Used for a path longer than host memory.
    """


@dataclass(slots=True, eq=False, kw_only=True)
class Retract(Copy):
    """Retract: a copy from device to host of all pages of a request, including unshared ones."""

    kind = OperationKind.RETRACT
    fills = HOST
    queue = Queue.BACKUP
    request: str


@dataclass(slots=True, eq=False, kw_only=True)
class LoadBack(Copy):
    """Load back: a copy from nodes' host pages to device pages, owned by the nodes or lent."""

    kind = OperationKind.LOAD_BACK
    fills = DEVICE
    queue = Queue.LOAD_BACK
    request: str


@dataclass(slots=True, eq=False, kw_only=True)
class Resume(Copy):
    """Resume: a copy from host to device of all pages of a retracted request."""

    kind = OperationKind.RESUME
    fills = DEVICE
    queue = Queue.LOAD_BACK
    request: str


Loading = LoadBack | Resume


@dataclass(slots=True, eq=False, kw_only=True)
class Persist(Moving):
    """Persist: a write of host pages to storage.

    The pages belong to tree nodes, which are pinned. Any pages listed in `segments` belong to the
    operation instead: they are temporary host pages.
    """

    kind = OperationKind.PERSIST
    fills = HOST
    queue = Queue.PERSIST
    used_at: StoreTime | None = None
    """The earliest store time (pages written, agreed time) at which one of these pages, or of the pages
    before them in the prefix, was last used.

    None until the write is ordered.
    """

    @property
    def is_for_store(self) -> bool:
        return True

    def is_to_fill(self, node: Node, tier: int, component: int) -> bool:
        """Return False, because a write to the store fills no pages of nodes."""
        del node, tier, component
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class Serving(Moving):
    """Serving: host pages that other groups may read; they belong to tree nodes, which are pinned."""

    kind = OperationKind.SERVE
    fills = None
    queue = Queue.QUIESCE
    """The queue of a stopped serving operation. A serving operation that has not been stopped is in no
    queue."""
    request: str
    last: Node | None = None
    """The deepest node whose full attention is served. The full attention of its ancestors is served,
    too."""

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
        """Return these objects without the first `count` of them."""
        component, positions, keys, pages = self
        return WantedPages(component, positions[count:], keys[count:], pages[count:])


@dataclass(slots=True, eq=False, kw_only=True)
class Prefetch(Operation):
    """A prefetch: a read of pages for one request from storage or from another group.

    Full-attention pages continue the path to `anchor` (`last_host_node`). Pages of other components may
    also fill nodes above the anchor. `floor` is the end of `best_match_node`: a prefix up to there can
    be restored without this prefetch.
    """

    kind = OperationKind.PREFETCH
    request: str
    anchor: Node
    floor: int
    tokens: bytes
    """The tokens of the requested full-attention pages."""
    needs: tuple[Need, ...]
    """By component, full attention first: the objects that the lookup queries."""
    components: tuple[Component, ...]
    """The components whose objects are queried and read, in the order of `needs`."""
    source: str = ""
    """The group from which the pages are read; empty if they are read from the store."""
    waits_since_ms: int
    """Agreed time (ms) at which the prefetch began to wait; 0 if the ranks had not agreed on a time
    yet."""
    prefetch_slot: int | None = None
    """Index of the prefetch's slot in the ballot, held from QUERY to TRANSFER; None otherwise."""
    bound: int = UNBOUNDED
    """The greatest length in pages, counted from `floor`, that a rank may vote for."""
    votes: int = 0
    """Number of votes in which the ranks did not agree on a length."""
    goal: int = 0
    """The position up to which the ranks agreed to restore the prefix.

    It may lie before the end of `anchor` if only windows or states are missing.
    """
    wanted: tuple[WantedPages, ...] = ()
    """The objects to read, in landing order: full attention first."""
    wanted_count: int = 0
    landed: int = 0
    """Number of objects that have landed on every rank, according to the last verdict."""
    budget: int = 0
    """Number of host pages that this prefetch takes from the prefetch budget."""
    keys: tuple[bytes, ...] = field(init=False)
    """The keys of the requested full-attention pages."""
    end: int = field(init=False)
    """The position after the last requested full-attention page."""

    def __post_init__(self) -> None:
        super(Prefetch, self).__post_init__()
        self.keys = self.needs[0].keys
        self.end = self.anchor.end + len(self.keys)

    @property
    def skips_known_misses(self) -> bool:
        """Whether objects that this prefetch finds missing are remembered as misses for a while.

        True only for a prefetch from the store. Later prefetches from the store skip these objects.
        """
        return not self.source

    def assign(self, wanted: Sequence[WantedPages]) -> None:
        """Set the objects to read; the operation owns their destination pages and no others."""
        self.wanted = tuple(wanted)
        self.wanted_count = sum(len(each.keys) for each in wanted)

    def drop(self, count: int) -> None:
        """Remove the first `count` objects; the operation no longer owns their destination pages."""
        kept: list[WantedPages] = []
        for each in self.wanted:
            if count < len(each.keys):
                kept.append(each.after(count))
            count = max(0, count - len(each.keys))
        self.assign(kept)

    def wanted_keys(self) -> list[tuple[int, bytes]]:
        """Return (component, key) of each object to read, in landing order."""
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
