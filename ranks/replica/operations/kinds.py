"""Operations in flight, as every replica holds them: one class for each kind.

An operation owns the pages that it fills until they settle or are given back, and it holds the
receipts of the locks and pins that keep its sources and its place in the tree alive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ....coordinator.operation import FIRST_PHASE, Kind, Outcome, Phase, Queue
from ....coordinator.seats import UNBOUNDED
from ...protocol.orders import Need
from ..core.pages import PageRun, page_run
from ..tree.components import Component
from ..tree.holds import Receipt
from ..tree.node import DEVICE, HOST, UNMARKED, Node, StoreTime


class Segment(NamedTuple):
    """A node whose pages of a component an operation reads or fills."""

    node: Node
    component: int


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """The common part of every kind of operation."""

    kind: ClassVar[Kind]
    id: int = 0
    """Its id, which it gets when it begins."""
    phase: Phase = field(init=False)
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    ending: Outcome | None = None
    """How it ended, once it has stopped and waits for quiet."""

    def __post_init__(self) -> None:
        self.phase = FIRST_PHASE[self.kind]

    @property
    def is_for_store(self) -> bool:
        """Whether it reads from the store that the group uses, or writes there."""
        return False

    @property
    def owns_pages(self) -> bool:
        """Whether any pages belong to this operation."""
        raise NotImplementedError

    def owned_pages(self, tier: int, component: int) -> PageRun:
        """Return a copy of all pages of a component on `tier` that belong to this operation."""
        raise NotImplementedError

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes that it refers to, some more than once."""
        for receipt in self.receipts:
            yield receipt.node


@dataclass(slots=True, eq=False, kw_only=True)
class Moving(Operation):
    """A copy or write of pages that nodes of the tree have, or are to have."""

    fills: ClassVar[int | None]
    """The tier on which its own pages lie, which its nodes are to have unless it is a `Persist`."""
    queue: ClassVar[Queue]
    """The queue in which it stands until it has ended."""
    components: Sequence[Component]
    segments: dict[Segment, PageRun] = field(default_factory=dict[Segment, PageRun])
    """The segments that it reads or fills, with its own pages for each; none where it only reads."""
    owned: dict[tuple[int, int], PageRun] = field(default_factory=dict[tuple[int, int], PageRun])
    """By tier and component: pages of the operation's own, beside those of its segments."""

    def own(self, tier: int, component: int, pages: PageRun) -> None:
        """Let pages belong to this operation."""
        if pages:
            self.owned.setdefault((tier, component), page_run()).extend(pages)

    def give(self, segment: Segment) -> PageRun:
        """Return the operation's own pages for a segment, which are the caller's now."""
        pages, self.segments[segment] = self.segments[segment], page_run()
        return pages

    def disown(self, tier: int, component: int) -> PageRun:
        """Return the pages beside those of its segments, which are the caller's now."""
        return self.owned.pop((tier, component), page_run())

    def in_order(self) -> list[Segment]:
        """Return what it reads or fills, by component and from the top down."""
        segments = list(self.segments)
        return segments if len(segments) == 1 else sorted(segments, key=_position)

    def mark(self) -> None:
        """Mark the nodes with this operation."""
        mark = frozenset((self,))
        for segment in self.segments:
            node = segment.node
            # Nearly every node has no other.
            node.marks = node.marks | mark if node.marks else mark

    def unmark(self, changed: dict[Node, None]) -> None:
        """Work on no node any more, and hold nothing but receipts: no node is to have its own pages.

        `changed` gets the nodes that it has worked on.
        """
        fills = self.fills
        for (node, component), pages in self.segments.items():
            if self in node.marks:
                # Nearly every node has no other.
                node.marks = node.marks - {self} if len(node.marks) > 1 else UNMARKED
            changed[node] = None
            if pages and fills is not None:
                self.own(fills, component, pages)
        self.segments.clear()

    def was_split(self, lower: Node, upper: Node) -> None:
        """Divide what it has of a node that was cut; see `tree.Mark`."""
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
    """How many device pages the engine leaves as they are for it: those of the whole prefix."""
    lender: str = ""
    """The request that lends them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Backup(Copy):
    """From device pages of nodes, or such as an engine lends, to host pages for those nodes."""

    kind = Kind.BACKUP
    fills = HOST
    queue = Queue.BACKUP
    passes: bool = False
    """Whether its host pages go on to a persist and not to the nodes: for a path that is longer than
    host memory."""


@dataclass(slots=True, eq=False, kw_only=True)
class Retract(Copy):
    """From device pages to host pages, of all that a request uses, also of what is its own."""

    kind = Kind.RETRACT
    fills = HOST
    queue = Queue.BACKUP
    request: str


@dataclass(slots=True, eq=False, kw_only=True)
class LoadBack(Copy):
    """From host pages of nodes to device pages for those nodes, or such as an engine lends."""

    kind = Kind.LOAD_BACK
    fills = DEVICE
    queue = Queue.LOAD_BACK
    request: str


@dataclass(slots=True, eq=False, kw_only=True)
class Resume(Copy):
    """From host pages to device pages, for a request that was retracted, also of what is its own."""

    kind = Kind.RESUME
    fills = DEVICE
    queue = Queue.LOAD_BACK
    request: str


Loading = LoadBack | Resume


@dataclass(slots=True, eq=False, kw_only=True)
class Persist(Moving):
    """A write of host pages to storage.

    The pages stay with their nodes, which are pinned. A segment that comes with pages is written from
    those: they are the operation's own, and its node is not to have them.
    """

    kind = Kind.PERSIST
    fills = HOST
    queue = Queue.PERSIST
    used_at: StoreTime | None = None
    """When its pages, or those that they continue, were used; None until it is ordered."""

    @property
    def is_for_store(self) -> bool:
        return True

    def is_to_fill(self, node: Node, tier: int, component: int) -> bool:
        """See `tree.Mark`: a write fills nothing."""
        del node, tier, component
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class Serving(Moving):
    """Host pages that other groups may read. They stay with their nodes, which are pinned."""

    kind = Kind.SERVE
    fills = None
    queue = Queue.QUIESCE
    """The only one in which it ever stands."""
    request: str
    last: Node | None = None
    """The last node whose full attention is served, as that of all before it is."""

    @property
    def end(self) -> int:
        """The position up to which full attention is served."""
        return 0 if self.last is None else self.last.end


class Wanted(NamedTuple):
    """Objects of one component that a prefetch reads: which positions, and into which pages."""

    component: int
    positions: Sequence[int]
    keys: tuple[bytes, ...]
    pages: PageRun

    def after(self, count: int) -> "Wanted":
        """Return all but the first `count` objects."""
        component, positions, keys, pages = self
        return Wanted(component, positions[count:], keys[count:], pages[count:])


@dataclass(slots=True, eq=False, kw_only=True)
class Prefetch(Operation):
    """Pages of one request that may come from storage.

    Pages of full attention continue the path to `anchor`, which is `last_host_node`; those of other
    components may also fill nodes above it. `floor` is where `best_match_node` ends: a shorter
    length would bring nothing.
    """

    kind = Kind.PREFETCH
    request: str
    anchor: Node
    floor: int
    tokens: bytes
    """The tokens of the pages of full attention that are asked for."""
    needs: tuple[Need, ...]
    """What the lookup asks for; full attention first."""
    components: tuple[Component, ...]
    """The components that it brings something of, each with its need."""
    source: str = ""
    """The group that it is brought from; empty for the store."""
    waits_since_ms: int
    """When it began to wait, in agreed time; 0 while no time has been agreed on."""
    seat: int | None = None
    """Its seat in the ballot, from QUERY to TRANSFER."""
    bound: int = UNBOUNDED
    """No rank votes for a longer length, counted from the floor."""
    votes: int = 0
    """How many lengths have been voted on."""
    goal: int = 0
    """The position that the ranks have agreed to restore; it may lie above the anchor, where other
    components alone are missing."""
    wanted: tuple[Wanted, ...] = ()
    """The objects that are read, in the order in which they count as landed: full attention first."""
    wanted_count: int = 0
    """How many objects are read."""
    landed: int = 0
    """How many of them have landed on every rank, as far as a verdict has said."""
    budget: int = 0
    """Pages that count against the bound on prefetching."""
    keys: tuple[bytes, ...] = field(init=False)
    """The keys of the pages of full attention that are asked for."""
    end: int = field(init=False)
    """The position at which these pages end."""

    def __post_init__(self) -> None:
        super(Prefetch, self).__post_init__()
        self.keys = self.needs[0].keys
        self.end = self.anchor.end + len(self.keys)

    @property
    def heeds_misses(self) -> bool:
        """Whether what it misses is not asked for again for a while; what a group promises may come."""
        return not self.source

    def assign(self, wanted: Sequence[Wanted]) -> None:
        """Set the objects that are read. Their pages are all that the operation owns."""
        self.wanted = tuple(wanted)
        self.wanted_count = sum(len(each.keys) for each in wanted)

    def drop(self, count: int) -> None:
        """Let the first `count` objects, and their pages, no longer be the operation's."""
        kept: list[Wanted] = []
        for each in self.wanted:
            if count < len(each.keys):
                kept.append(each.after(count))
            count = max(0, count - len(each.keys))
        self.assign(kept)

    def wanted_keys(self) -> list[tuple[int, bytes]]:
        """Return the component and the key of each object that is read, in order."""
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
