"""Operations in flight, as every replica holds them.

An operation owns the pages that it fills until they settle or are given back, and it holds the
receipts of the locks and pins that keep its sources and its place in the tree alive.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...coordinator.operation import FIRST_PHASE, TRANSITIONS, Kind, Outcome, Phase, Queue
from ...errors import InternalError
from .holds import Receipt
from .pages import PageRun, page_run
from .tree import DEVICE, HOST, Node


@dataclass(slots=True)
class Segment:
    """A node whose pages an operation reads or fills, and the operation's own pages for it."""

    node: Node
    pages: PageRun


@dataclass(slots=True, eq=False)
class Operation:
    """What every kind of operation has."""

    id: int
    kind: Kind
    phase: Phase
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    owned: tuple[PageRun, PageRun] = field(default_factory=lambda: (page_run(), page_run()))
    """By tier: pages of the operation that belong to no node, beside those of its segments."""
    ending: Outcome | None = None
    """How it ended, once it has stopped and waits for quiet."""
    stopped_pages: int = 0
    """Pages that its I/O may touch although it has stopped; they count in quarantine."""

    def owned_pages(self, tier: int) -> PageRun:
        """Return all pages of `tier` that belong to this operation."""
        return self.owned[tier]


@dataclass(slots=True, eq=False)
class Copy(Operation):
    """A backup or load back: pages of the segments' nodes to or from the operation's own."""

    segments: list[Segment] = field(default_factory=list[Segment])
    request: str | None = None
    """The request that a load back is for."""

    @property
    def fills(self) -> int:
        """The tier on which the operation's own pages lie."""
        return HOST if self.kind is Kind.BACKUP else DEVICE

    def owned_pages(self, tier: int) -> PageRun:
        """See `Operation`."""
        pages = page_run(self.owned[tier])
        if tier == self.fills:
            for segment in self.segments:
                pages.extend(segment.pages)
        return pages


@dataclass(slots=True, eq=False)
class Persist(Operation):
    """A write of host pages, which stay in the tree, pinned, to storage."""

    segments: list[Segment] = field(default_factory=list[Segment])
    """The nodes and the host pages that are written; the pages belong to the nodes."""


@dataclass(slots=True, eq=False)
class Prefetch(Operation):
    """Pages of one request that may come from storage; they continue the path to `anchor`."""

    request: str = ""
    anchor: Node | None = None
    tokens: bytes = b""
    """The tokens of the pages asked for."""
    keys: tuple[bytes, ...] = ()
    landed: int = 0
    """Pages that have landed on every rank, as far as a verdict has said."""
    waits_since_ms: int = 0
    """When it began to wait, in agreed time; 0 while no time has been agreed on."""
    budget: int = 0
    """Pages that count against the bound on prefetching."""


class OperationTable:
    """The operations in flight by id, and the watermark queues they stand in."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Operation] = {}
        self.queues: dict[Queue, deque[tuple[int, int]]] = {queue: deque() for queue in Queue}
        """(ticket, operation id) in the order in which they will settle."""
        self.outcomes: Counter[tuple[Kind, Outcome]] = Counter()
        self._next_id = 1
        self._next_ticket = 1

    def new_id(self) -> int:
        """Return an id that was never used."""
        number = self._next_id
        self._next_id += 1
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

    def advance(self, operation: Operation, phase: Phase) -> None:
        """Change the phase, if the table of transitions has that step."""
        allowed = TRANSITIONS[operation.kind].get(operation.phase, frozenset())
        if phase not in allowed:
            raise InternalError(
                f"{operation.kind.name} {operation.id} cannot go from {operation.phase.name}"
                f" to {phase.name}"
            )
        operation.phase = phase

    def of(self, kind: type[Operation], *phases: Phase) -> Iterator[Operation]:
        """Yield the operations of a class that stand in one of `phases`, in the order of ids."""
        for operation in self.in_flight.values():
            if operation.phase in phases and isinstance(operation, kind):
                yield operation
