"""Persist: write to storage the pages that every rank has in host memory."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ....coordinator.operation import OperationKind, Outcome, Queue
from ...protocol.events import Cause, NotBegun, Stored, Tier
from ...protocol.orders import ObjectTransfer
from ..core.pages import PageRun, page_run
from ..core.replica_parts import ReplicaParts
from ..tree.backlog import Undone
from ..tree.components import Component
from ..tree.node import HOST, Node
from ..tree.page_allocator import PageAllocator
from ..tree.prefixes import Prefixes
from ..tree.ref_counts import LockHandle
from .kinds import Persist, Segment
from .operation_table import OperationTable
from .pauses import Pauses
from .requests import Requests
from .store import Store

_PIECE_PAGES = 8
"""Maximum number of pages written at once when a failed write is retried in pieces."""


class Persisting:
    """Starts persists, a bounded number at a time, and records which pages the store has.

    A path that cannot be written now gets an entry in the backlog `PageAllocator.not_stored`. While the
    store fails, new paths go to the backlog at once, and one write is tried after each backoff pause.
    """

    def __init__(
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        store: Store,
        requests: Requests,
    ) -> None:
        config = basis.config
        self._bounds = config.bounds
        self._names_pages = config.names_pages
        self._prefixes = prefixes
        self._operation_table = operation_table
        self._store = store
        self._requests = requests
        self._outbox = basis.outbox
        self._seen = basis.misses
        self.waiting: deque[Persist] = deque()
        self.issued = 0
        """Number of persists that have been ordered and have not settled."""
        self.pauses = Pauses(basis.clock)

    def offer(self, settled: Sequence[Segment], last: Node | None = None) -> None:
        """Persist the pages of `settled` (node, component) that the store lacks.

        The host has all pages of `settled`. `last` is the node at which the match that needs the pages
        ends; None stands for the deepest node written.
        """
        if not settled or not self._keeps(settled[0].node):
            return
        unsaved = self._unsaved(settled)
        if unsaved:
            self._write(dict.fromkeys(unsaved, page_run()), last)

    def offer_path(self, node: Node, *, again: bool = False) -> None:
        """Persist the pages that a match at `node` needs, if the host has and the store lacks them.

        If the store has everything, this costs one lookup. With `again` (a retry), pages that were seen
        in the store long ago still count as stored, so they are not written again.
        """
        if not self._keeps(node):
            return
        unsaved = self._above(node, again=again)
        if node.values[HOST][0] is not None:
            for component in self._prefixes.components[1:]:
                start = component.needed_from(node.end - 1)
                here = (Segment(each, component.index) for each in node.path() if each.end > start)
                unsaved += [each for each in here if self._is_lacking(each)]
        if unsaved:
            self._write(dict.fromkeys(unsaved, page_run()), node)

    def offer_again(self, node: Node, cause: Undone) -> None:
        """Persist a few pages of the path to `node` that host memory has and the store lacks.

        At most `_PIECE_PAGES` pages are written, because a store that is too slow for the whole path
        may accept so few. The rest gets a new backlog entry. The search starts at the root, because the
        store may lack pages above others that it has.
        """
        if not self._keeps(node):
            return
        every = (
            Segment(each, component.index)
            for component in self._prefixes.components
            for each in node.path_down()
        )
        piece, rest = self._divide([each for each in every if self._is_lacking(each)])
        if piece:
            self._write(dict.fromkeys(piece, page_run()), node)
        self._postpone(rest, cause)

    def postpone_older(self) -> None:
        """Queue pages cached before the store was attached, to be persisted later.

        Runs once per store, because it visits the whole tree.
        """
        if not (self._store.attached and self._store.lacks_older):
            return
        self._store.lacks_older = False
        for node in self._prefixes.tree.nodes():
            every = (Segment(node, each.index) for each in self._prefixes.components)
            if self._keeps(node):
                self._postpone(filter(self._is_lacking, every), Undone.NEW_STORE)

    def pass_on(self, pages: dict[Segment, PageRun], last: Node) -> None:
        """Persist temporary host pages; the new operation owns them from now on.

        If the write cannot begin, the pages are freed.
        """
        if not (self._keeps(last) and self._write(pages, last)):
            pools = self._prefixes.allocator.pools[HOST]
            for segment, run in pages.items():
                pools[segment.component].give_back(run)

    def lacks(self, node: Node, component: int) -> bool:
        """Return whether the store lacks a node's pages of a component and none is being written."""
        return not (
            self._store.has(node, component)
            or any(_writes(mark, Segment(node, component)) for mark in node.marks)
        )

    def has(self, node: Node, component: int) -> bool:
        """Return whether the store is known to have a node's pages of a component."""
        return self._store.has(node, component)

    def remember_written(self, node: Node) -> None:
        """Mark nodes on the path to `node` as stored if their pages are remembered as written recently.

        A node that has lost its pages leaves the tree, together with the record that the store has
        them. On a path of lent pages longer than host memory, this may happen before the whole path is
        written. The keys of written pages are therefore remembered for a while, and each call extends
        that time.
        """
        for each in node.path_down():
            for component in self._prefixes.components:
                index = component.index
                if each.values[HOST][index] is not None:
                    continue
                pool, keys = self._named(Segment(each, index))
                if self.has(each, index):
                    self._store.count_recent(pool, keys)
                if not self.lacks(each, index):
                    continue
                known = self._store.recent_count(pool, keys)
                self._store.count_recent(pool, keys[:known])
                if 0 < known < each.width and not index:
                    self._prefixes.split(each, known)
                    assert each.parent is not None
                    self._recall(each.parent, index)
                elif known == len(keys):
                    self._recall(each, index)

    def _recall(self, node: Node, component: int) -> None:
        self._store.note_written(node, component, 0, self._store.time)
        # Consider the node for a merge: now that it counts as stored, it may no longer differ from a
        # neighbour.
        self._prefixes.allocator.changed[node] = None

    def keeps(self, node: Node) -> bool:
        """Return whether pages cached at `node` are to be written to the attached store."""
        return self._keeps(node)

    @property
    def is_full(self) -> bool:
        """Return whether the queue of waiting persists is full."""
        return bool(self.waiting) and len(self.waiting) >= self._bounds.persists_waiting

    @property
    def has_turn(self) -> bool:
        """Whether one more persist may be ordered within the bound on persists in flight."""
        return self.issued < self._bounds.persists

    def begin_waiting(self) -> None:
        """Order the writes of waiting persists, lowest id first, up to the bound on ordered writes."""
        while self.waiting and self.has_turn:
            operation = self.waiting.popleft()
            self.issued += 1
            transfers = [
                self._transfer(
                    each,
                    operation.segments[each] or _host_pages(each),
                    stored=self._store.had(each.node),
                )
                for each in operation.in_order()
            ]
            above, distance = self._continued(operation)
            operation.used_at = self._store.seen_first(_path_to(above, operation))
            after = b"" if above is None else self._prefixes.tree.keys(above)[-1]
            self._operation_table.persist(operation, transfers, after, distance)

    def ended(self, operation: Persist) -> None:
        """Apply a persist that has finished on every rank."""
        self.pauses.succeeded()
        for segment in operation.in_order():
            pool, keys = self._named(segment)
            assert operation.used_at is not None
            self._store.note_written(segment.node, segment.component, len(keys), operation.used_at)
            self._store.forget_misses(pool, keys)
            if not segment.component:
                self._seen.stored(keys)
            if self._prefixes.allocator.not_on_host.awaited:
                self._store.count_recent(pool, keys)
            after = b""
            named: tuple[bytes, ...] = ()
            if self._names_pages and not segment.component:
                after, named = self._prefixes.tree.key_before(segment.node), keys
            event = Stored(Tier.STORAGE, pool, len(keys), Cause.PERSISTED, after, named)
            self._outbox.events.append(event)
        self.issued -= 1
        self._operation_table.finish(operation, Outcome.COMPLETE)
        self.begin_waiting()

    def failed(self, operation: Persist) -> None:
        """Apply a persist that failed on some rank; its pages stay pinned until all I/O has ended."""
        self.issued -= 1
        self.pauses.failed()
        self._postpone(operation.segments, Undone.STORE_FAILED)
        self._operation_table.stop(operation, Outcome.FAILED)
        self.begin_waiting()

    def quiet(self, operation: Persist) -> None:
        """Finish a stopped persist whose pages no rank's I/O touches any more."""
        self._operation_table.finish(operation)

    def abandon(self) -> None:
        """Stop all persists because the store is detached; those not yet ordered end at once."""
        while self.waiting:
            self._operation_table.finish(self.waiting.popleft(), Outcome.ABORTED)
        self._operation_table.stop_issued(Queue.PERSIST, Outcome.ABORTED)
        self.issued = 0
        self._prefixes.allocator.not_stored.clear()
        self.pauses.succeeded()

    def _keeps(self, node: Node) -> bool:
        return self._store.keeps(node.place, self._requests.generation)

    def _unsaved(self, settled: Sequence[Segment]) -> list[Segment]:
        """Return the segments (node, component) to write: those of `settled` that the store lacks.

        Missing full attention further up the path comes first, because a stored prefix cannot be found
        without its beginning. The store may lack it because a write failed, or because the store was
        attached later.
        """
        for node, _ in settled:
            self._doubt_old(node)
        new = [each for each in settled if self.lacks(*each)]
        if not new:
            return []
        if len(new) == 1 and not new[0].node.start:
            return new
        full = {id(each.node) for each in settled if not each.component}
        last = max((each.node for each in new), key=lambda node: node.end)
        return [each for each in self._above(last) if id(each.node) not in full] + new

    def _above(self, node: Node, *, again: bool = False) -> list[Segment]:
        """Return the full-attention segments that the host has and the store lacks, from the top.

        If a node's store record was invalidated, the node's other components are included, too. The
        search goes up from `node` and ends at the first node that the store has. Nodes further up need
        no check, because a persist includes missing pages above its own, a failed persist leaves a
        backlog entry, and the records of nodes further up are at least as recent.
        """
        found: list[Segment] = []
        others: list[Segment] = []
        for each in node.path():
            doubted = not again and self._doubt_old(each)
            if each.values[HOST][0] is None:
                continue
            if self._store.has(each, 0):
                break
            if self.lacks(each, 0):
                found.append(Segment(each, 0))
            if doubted:
                others += [Segment(each, at.index) for at in self._prefixes.components[1:]]
        return found[::-1] + [each for each in others if self._is_lacking(each)]

    def _doubt_old(self, node: Node) -> bool:
        doubted = self._store.invalidate_stored(node)
        if doubted:
            self._prefixes.allocator.changed[node] = None
        return doubted

    def _continued(self, operation: Persist) -> tuple[Node | None, int]:
        """Return (node, distance): the nearest stored node above a persist's first page.

        The distance in pages is from the node's last page to the persist's first page. Returns None and
        0 if the store has no such node.
        """
        segments = operation.in_order()
        if not segments:
            return None, 0
        node, component = segments[0]
        above = node if component else node.parent
        while above is not None and above.parent is not None:
            if self._store.has(above, 0):
                return above, (node.end if component else node.start) + 1 - above.end
            above = above.parent
        return None, 0

    def _is_lacking(self, segment: Segment) -> bool:
        node, component = segment
        return node.values[HOST][component] is not None and self.lacks(node, component)

    def _write(self, segments: dict[Segment, PageRun], last: Node | None) -> bool:
        """Start a persist; return False, and add a backlog entry, if the store cannot accept it now."""
        if self.is_full:
            self._postpone(segments, Undone.STORE_BUSY)
            self._outbox.events.append(NotBegun(OperationKind.PERSIST))
            return False
        if not self.pauses.allow():
            self._postpone(segments, Undone.STORE_FAILED)
            return False
        if last is None:
            last = max((segment.node for segment in segments), key=lambda node: node.end)
        operation = Persist(
            components=self._prefixes.components,
            lock_handles=hold_pieces(self._prefixes.allocator, HOST, segments),
            segments={segment: page_run(pages) for segment, pages in segments.items()},
        )
        self._operation_table.begin(operation, last.id)
        self.waiting.append(operation)
        self.begin_waiting()
        return True

    def _divide(self, unsaved: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
        piece: list[Segment] = []
        left = _PIECE_PAGES
        for at, (node, index) in enumerate(unsaved):
            if not left:
                return piece, list(unsaved[at:])
            pages = self._component(index).pages_of(node.width)
            if pages > left:
                self._prefixes.split(node, left)
                assert node.parent is not None
                return [*piece, Segment(node.parent, index)], list(unsaved[at:])
            piece.append(Segment(node, index))
            left -= pages
        return piece, []

    def _postpone(self, segments: Iterable[Segment], cause: Undone) -> None:
        last, pages = None, 0
        for node, component in segments:
            pages += self._component(component).pages_of(node.width)
            last = node if last is None or node.end > last.end else last
        if last is not None:
            self._prefixes.allocator.not_stored.add(last, cause, pages)

    def transfer(self, segment: Segment) -> ObjectTransfer:
        """Return the transfer of a segment (node, component): object keys and the node's host pages."""
        return self._transfer(segment, _host_pages(segment))

    def _transfer(
        self, segment: Segment, pages: PageRun, *, stored: bool = False
    ) -> ObjectTransfer:
        pool, keys = self._named(segment)
        return ObjectTransfer(pool, keys, tuple(pages), stored)

    def _named(self, segment: Segment) -> tuple[str, tuple[bytes, ...]]:
        component = self._component(segment.component)
        keys = self._prefixes.tree.keys(segment.node)
        return component.pool, tuple(keys if component.per_page else keys[-1:])

    def _component(self, index: int) -> Component:
        return self._prefixes.components[index]


def hold_pieces(
    allocator: PageAllocator, tier: int, pieces: Iterable[tuple[Node, int]]
) -> list[LockHandle]:
    """Lock or pin each of `pieces` (node, component) on one path, and the path's full attention."""
    acquire = allocator.ref_counts.acquire
    pieces = list(pieces)
    deepest = max((node for node, _ in pieces), key=lambda node: node.end)
    lock_handles = [acquire(tier, 0, deepest)]
    return lock_handles + [
        acquire(tier, index, node, node.start) for node, index in pieces if index
    ]


def _path_to(above: Node | None, operation: Persist) -> Iterator[Node]:
    """Yield the nodes from a persist's deepest node up to `above`; None stands for the top node."""
    last = max((each.node for each in operation.segments), key=lambda node: node.end, default=None)
    for node in () if last is None else last.path():
        yield node
        if node is above:
            return


def _host_pages(segment: Segment) -> PageRun:
    pages = segment.node.values[HOST][segment.component]
    assert pages is not None
    return pages


def _writes(mark: object, segment: Segment) -> bool:
    return isinstance(mark, Persist) and segment in mark.segments
