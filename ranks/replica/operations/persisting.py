"""Persist: pages that every rank has in host memory, to storage."""

from collections import deque
from collections.abc import Iterable, Sequence

from ....coordinator.operation import Kind, Outcome, Queue
from ...orders import ObjectTransfer
from ..effects import Outbox
from ..notices import Cause, NotBegun, Stored, Tier
from ..pages import page_run
from ..requests import Request, Requests
from ..settings import ReplicaConfig
from ..store import Store
from ..tail import Tail
from ..tree.holds import Receipt
from ..tree.node import HOST, Node
from ..tree.prefixes import Prefixes
from ..tree.residence import Residence
from .agenda import Agenda
from .kinds import Persist, Segment


class Persisting:
    """Begins persists, so many at a time, and notes what the store has."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        config: ReplicaConfig,
        prefixes: Prefixes,
        agenda: Agenda,
        store: Store,
        requests: Requests,
        outbox: Outbox,
    ) -> None:
        self._bounds = config.bounds
        self._names_pages = config.names_pages
        self._prefixes = prefixes
        self._agenda = agenda
        self._store = store
        self._requests = requests
        self._outbox = outbox
        self.waiting: deque[Persist] = deque()
        self.issued = 0
        """Persists whose order was given and that have not settled."""

    def offer(self, settled: Sequence[Segment], last: Node | None = None) -> None:
        """Persist the part of `settled` that the store lacks. Host memory has all of it.

        It is what a match needs that ends with the deepest node of that part, or at `last`.
        """
        if not settled or not self._store.keeps(settled[0].node.place, self._requests.generation):
            return
        unsaved = self._unsaved(settled)
        if not unsaved:
            return
        for node, _ in unsaved:
            self._store.offer(node)
            self._prefixes.residence.changed[node] = None
        if self.is_full:
            self._outbox.notices.append(NotBegun(Kind.PERSIST))
            return
        if last is None:
            last = max((segment.node for segment in unsaved), key=lambda node: node.end)
        residence = self._prefixes.residence
        operation = Persist(
            components=self._prefixes.components,
            receipts=residence.hold(HOST, last) + hold_above(residence, last, unsaved),
            segments={segment: page_run() for segment in unsaved},
        )
        self._agenda.begin(operation, last.id)
        self.waiting.append(operation)
        self.begin_waiting()

    def write_tail(self, request: Request, tail: Tail) -> None:
        """Write the tail that a request has saved, unless too many persists wait.

        Its pages are the operation's until it has ended; the request notes that it is stored.
        """
        if self.is_full:
            return
        operation = Persist(components=self._prefixes.components, request=request.id, tail=tail)
        self._agenda.begin(operation, request.id, tail.tokens)
        self._requests.lend_saved(request, operation)
        self.waiting.append(operation)
        self.begin_waiting()

    @property
    def is_full(self) -> bool:
        """Whether so many persists wait that no more may."""
        return bool(self.waiting) and len(self.waiting) >= self._bounds.persists_waiting

    def begin_waiting(self) -> None:
        """Give the orders of the persists whose turn has come, in the order of their ids."""
        while self.waiting and self.issued < self._bounds.persists:
            operation = self.waiting.popleft()
            self.issued += 1
            transfers = [self.transfer(each) for each in operation.in_order()]
            if operation.tail is not None:
                components = self._prefixes.components
                pages = [operation.owned_pages(HOST, each.index) for each in components]
                transfers += operation.tail.transfers(components, pages, sealed=True)
            self._agenda.persist(operation, transfers)

    def ended(self, operation: Persist) -> None:
        """Apply a persist that has ended on every rank."""
        for segment in operation.in_order():
            self._store.offer(segment.node, segment.component)
            pool, keys = self._named(segment)
            self._store.forget_misses(pool, keys)
            after = b""
            named: tuple[bytes, ...] = ()
            if self._names_pages and not segment.component:
                after, named = self._prefixes.tree.key_before(segment.node), keys
            told = Stored(Tier.STORAGE, pool, len(keys), Cause.PERSISTED, after, named)
            self._outbox.notices.append(told)
        request = self._requests.take_back(operation)
        if request is not None and operation.tail is not None:
            request.stored = self._store.number, operation.tail.key
        self.issued -= 1
        self._agenda.finish(operation, Outcome.COMPLETE)
        self.begin_waiting()

    def failed(self, operation: Persist) -> None:
        """Apply a persist that failed on some rank; its pages are held until all are quiet."""
        self.issued -= 1
        self._agenda.stop(operation, Outcome.FAILED)
        self.begin_waiting()

    def quiet(self, operation: Persist) -> None:
        """Finish a persist that was stopped, and that no rank's I/O goes on with."""
        self._requests.take_back(operation)
        self._agenda.finish(operation)

    def abandon(self) -> None:
        """End the persists that have not begun, and stop the others: the store is detached."""
        while self.waiting:
            operation = self.waiting.popleft()
            self._requests.take_back(operation)
            self._agenda.finish(operation, Outcome.ABORTED)
        self._agenda.stop_issued(Queue.PERSIST, Outcome.ABORTED)
        self.issued = 0

    def _unsaved(self, settled: Sequence[Segment]) -> list[Segment]:
        """Return what of `settled` the store lacks, after what of the path above it was never offered.

        What was in host memory before the store was attached goes there with the first of its
        descendants that does: a prefix without its beginning could not be found.
        """
        store = self._store
        new = [each for each in settled if not store.has(each.node, each.component)]
        if not new:
            return []
        if len(new) == 1 and not new[0].node.start:
            # Nothing is above it.
            return new
        full = {id(each.node) for each in settled if not each.component}
        last = max((each.node for each in new), key=lambda node: node.end)
        above = [
            Segment(node, 0)
            for node in last.path()
            if node.store != store.number
            and id(node) not in full
            and node.values[HOST][0] is not None
        ]
        return above[::-1] + new

    def transfer(self, segment: Segment) -> ObjectTransfer:
        """Return the objects of a segment, and the host pages that hold them."""
        pages = segment.node.values[HOST][segment.component]
        assert pages is not None
        pool, keys = self._named(segment)
        return ObjectTransfer(pool, keys, tuple(pages))

    def _named(self, segment: Segment) -> tuple[str, tuple[bytes, ...]]:
        component = self._prefixes.components[segment.component]
        keys = self._prefixes.tree.keys(segment.node)
        return component.pool, tuple(keys if component.per_page else keys[-1:])


def hold_above(
    residence: Residence, node: Node, pieces: Iterable[tuple[Node, int]]
) -> list[Receipt]:
    """Pin what of the path to `node` a match there does not need, down from where `pieces` begin.

    Each piece is a node of the path, and a component of which it is to stay on the host.
    """
    starts: dict[int, int] = {}
    for piece, index in pieces:
        component = residence.components[index]
        if component.per_page and piece.start < component.needed_from(node.end):
            starts[index] = min(piece.start, starts.get(index, piece.start))
    return [residence.holds.acquire(HOST, index, node, start) for index, start in starts.items()]
