"""Operations in flight, as every replica holds them.

An operation owns the pages that it fills until they settle or are given back, and it holds the
receipts of the locks and pins that keep its sources and its place in the tree alive.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...coordinator.operation import FIRST_PHASE, TRANSITIONS, Kind, Outcome, Phase, Queue
from ...coordinator.seats import UNBOUNDED
from ...errors import InternalError
from ..orders import Need
from .holds import Receipt
from .pages import PageRun, page_run
from .tree import DEVICE, HOST, Node


@dataclass(slots=True)
class Segment:
    """A node whose pages an operation reads or fills, and the operation's own pages for it."""

    node: Node
    component: int
    pages: PageRun


@dataclass(slots=True, eq=False)
class Operation:
    """What every kind of operation has."""

    id: int
    kind: Kind
    phase: Phase
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    segments: list[Segment] = field(default_factory=list[Segment])
    """The nodes that it reads or fills; a prefetch has none."""
    touched: set[tuple[Node, int]] = field(default_factory=set[tuple[Node, int]])
    """The node and component of each segment."""
    ending: Outcome | None = None
    """How it ended, once it has stopped and waits for quiet."""

    @property
    def owns_pages(self) -> bool:
        """Whether any pages belong to this operation."""
        return False

    def owned_pages(self, tier: int, component: int) -> PageRun:
        """Return a copy of all pages of a component on `tier` that belong to this operation."""
        del tier, component
        return page_run()


@dataclass(slots=True, eq=False)
class Copy(Operation):
    """A backup or load back: pages of the segments' nodes to or from the operation's own."""

    request: str | None = None
    """The request that a load back is for, or that a backup takes off the device."""
    resumes: bool = False
    """A load back that brings a retracted request's own pages, too."""
    lent: int = 0
    """How many device pages the engine leaves as they are for it: those of the whole prefix."""
    owned: dict[tuple[int, int], PageRun] = field(default_factory=dict[tuple[int, int], PageRun])
    """By tier and component: pages of the operation's own, beside those of its segments."""

    def own(self, tier: int, component: int, pages: PageRun) -> None:
        """Let pages belong to this operation."""
        if pages:
            self.owned.setdefault((tier, component), page_run()).extend(pages)

    @property
    def fills(self) -> int:
        """The tier on which the operation's own pages lie."""
        return HOST if self.kind is Kind.BACKUP else DEVICE

    @property
    def owns_pages(self) -> bool:
        """See `Operation`."""
        for segment in self.segments:
            if segment.pages:
                return True
        return bool(self.owned)

    def owned_pages(self, tier: int, component: int) -> PageRun:
        """See `Operation`."""
        pages = page_run(self.owned.get((tier, component), ()))
        if tier == self.fills:
            for segment in self.segments:
                if segment.component == component:
                    pages.extend(segment.pages)
        return pages


@dataclass(slots=True, eq=False)
class Persist(Operation):
    """A write of host pages to storage: those of the segments, which belong to their nodes.

    They stay in the tree, pinned.
    """


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


@dataclass(slots=True, eq=False)
class Prefetch(Operation):
    """Pages of one request that may come from storage.

    Pages of full attention continue the path to `anchor`, which is `last_host_node`; those of other
    components may also fill nodes above it. `floor` is where `best_match_node` ends: a shorter
    length would bring nothing.
    """

    request: str = ""
    anchor: Node | None = None
    floor: int = 0
    tokens: bytes = b""
    """The tokens of the pages of full attention that are asked for."""
    needs: tuple[Need, ...] = ()
    """What the lookup asks for; full attention first."""
    seat: int | None = None
    """Its place in the ballot, from QUERY to TRANSFER."""
    bound: int = UNBOUNDED
    """No rank votes for a longer length, counted from the floor."""
    votes: int = 0
    """How many lengths have been voted on."""
    goal: int = 0
    """The position that the ranks have agreed to restore; it may lie above the anchor, where other
    components alone are missing."""
    wanted: tuple[Wanted, ...] = ()
    """What is read, in the order in which it counts as landed: full attention first."""
    wanted_count: int = 0
    """How many objects that is."""
    landed: int = 0
    """How many of them have landed on every rank, as far as a verdict has said."""
    end: int = 0
    """The position that the pages asked for lead to."""
    waits_since_ms: int = 0
    """When it began to wait, in agreed time; 0 while no time has been agreed on."""
    budget: int = 0
    """Pages that count against the bound on prefetching."""

    def assign(self, wanted: Sequence[Wanted]) -> None:
        """Let this be what is read, and its pages all that the operation owns."""
        self.wanted = tuple(wanted)
        self.wanted_count = 0
        for each in wanted:
            self.wanted_count += len(each.keys)

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
    def owns_pages(self) -> bool:
        """See `Operation`."""
        return bool(self.wanted)

    def owned_pages(self, tier: int, component: int) -> PageRun:
        """See `Operation`."""
        pages = page_run()
        if tier == HOST:
            for each in self.wanted:
                if each.component == component:
                    pages.extend(each.pages)
        return pages

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of the pages of full attention that are asked for."""
        return self.needs[0].keys


_AT_REST = (Phase.QUARANTINED, Phase.DONE)
_NOWHERE: frozenset[Phase] = frozenset()


class OperationTable:
    """The operations in flight by id, and the watermark queues they stand in."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Operation] = {}
        self.queues: dict[Queue, deque[tuple[int, int]]] = {queue: deque() for queue in Queue}
        """(ticket, operation id) in the order in which they will settle."""
        self.outcomes: Counter[tuple[Kind, Outcome]] = Counter()
        self.working: Counter[Kind] = Counter()
        """How many of each kind are in flight and not quarantined."""
        self.next_id = 1
        """The id of the next operation."""
        self._next_ticket = 1

    def new_id(self) -> int:
        """Return an id that was never used."""
        number = self.next_id
        self.next_id += 1
        return number

    def new_ticket(self, queue: Queue, operation: Operation) -> int:
        """Put the operation at the end of `queue` and return its ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self.queues[queue].append((ticket, operation.id))
        return ticket

    def add(self, operation: Operation) -> None:
        """Enter a new operation, which stands in the first phase of its kind."""
        if operation.phase is not FIRST_PHASE[operation.kind]:
            raise InternalError(f"operation {operation.id} begins in {operation.phase.name}")
        self.in_flight[operation.id] = operation
        self.working[operation.kind] += 1

    def advance(self, operation: Operation, phase: Phase) -> None:
        """Change the phase, if the table of transitions has that step."""
        kind, before = operation.kind, operation.phase
        if phase not in TRANSITIONS[kind].get(before, _NOWHERE):
            raise InternalError(
                f"{kind.name} {operation.id} cannot go from {before.name} to {phase.name}"
            )
        if phase in _AT_REST and before not in _AT_REST:
            self.working[kind] -= 1
        operation.phase = phase

    def of(self, kind: type[Operation], *phases: Phase) -> Iterator[Operation]:
        """Yield the operations of a class that stand in one of `phases`, in the order of ids."""
        for operation in self.in_flight.values():
            if operation.phase in phases and isinstance(operation, kind):
                yield operation
