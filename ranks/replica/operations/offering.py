"""Offering: what a request has computed, to readers of other groups.

In the store they find what every rank has persisted; out of host memory they read what every rank has
there, which is pinned for them. Either way the answer is a level: how far it goes by verdicts. What is
computed is offered while the prompt goes on, full attention alone; the request that has been retracted
with its tail and with what a match at its end needs beside; and that which ends here with the latter.
One request may be served up to several ends: what a match needs is pinned for each of them.
"""

from collections.abc import Sequence

from ....coordinator.operation import Outcome
from ...orders import ObjectTransfer
from ..basis import Basis
from ..deadlines import AgreedDeadlines
from ..pages import page_run
from ..requests import Request, Requests, Stage
from ..store import Store
from ..tail import Tail, tail_of
from ..tree.components.base import Component
from ..tree.node import DEVICE, HOST, Node, needed
from ..tree.prefixes import Prefixes
from ..tree.tokens import TOKEN_BYTES
from .agenda import Agenda
from .backing_up import BackingUp
from .kinds import Persist, Segment, Serving
from .persisting import Persisting
from .saving import Saving

PINNED_SHARE_MAX = 0.75
"""Nothing more is served while so much of a pool of host memory is pinned for whatever reason: the rest
is for those who compute."""


class Offering:
    """The offers of requests."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: Basis,
        prefixes: Prefixes,
        agenda: Agenda,
        store: Store,
        requests: Requests,
        backing_up: BackingUp,
        persisting: Persisting,
        saving: Saving,
    ) -> None:
        self._owns_device = basis.config.device_pages > 0
        self._clock = basis.clock
        self._journal = basis.journal
        self._prefixes = prefixes
        self._agenda = agenda
        self._store = store
        self._requests = requests
        self._backing_up = backing_up
        self._persisting = persisting
        self._saving = saving
        self.served: dict[str, Serving] = {}
        """What is served, by request."""
        self._deadlines: AgreedDeadlines[Serving] = AgreedDeadlines()

    def in_store(self, request: Request, tokens: bytes) -> int:
        """Have `tokens` persisted as far as they are not; return how many the store has by now."""
        node = self._last(request, tokens)
        if node is None or not self._store.keeps(request.place, self._requests.generation):
            return 0
        self._requests.witness_tokens("offer", request.id, tokens)
        tail = self._tail(request, node, tokens)
        wanted = self._segments(node, self._saving.shared if tail is not None else ())
        lacking = [each for each in wanted if not self._store.has(*each)]
        self._bring_to_host(request, node, lacking)
        self._persisting.offer([each for each in lacking if _is_idle(each)], node)
        known = None if tail is None else (self._store.number, tail.key)
        if tail is not None and tail.components and request.stored != known:
            if request.saved is not None:
                self._persisting.write_tail(request, tail)
        elif tail is not None and not lacking:
            return tail.tokens
        return self._pages(self._end(lacking, node), tail)

    def directly(self, request: Request, tokens: bytes, ttl_ms: int, *, ends: bool = False) -> int:
        """Let other groups read `tokens` as far as host memory has them; return how many by now.

        With `ends`, also what a match needs at the end of their whole pages, states included.
        """
        node = self._last(request, tokens)
        current = self._requests.is_current(request.place) and request.place.outlives
        if node is None or not current:
            return 0
        command = "serve the end" if ends else "serve"
        self._requests.witness_tokens(command, request.id, tokens, ttl_ms)
        tail = None if ends else self._tail(request, node, tokens)
        whole = ends and node.end == self._prefixes.tree.whole_pages(tokens)
        # A tail has the state itself.
        others = self._prefixes.components if whole else self._saving.shared
        beside = others if whole or tail is not None else ()
        wanted, lacking = self._wanted(node, beside)
        if self._bring_to_host(request, node, lacking):
            # Nodes may have been cut for the backup.
            wanted, lacking = self._wanted(node, beside)
        # What a match at the end needs beside is served all together, if there is a tail with that.
        may_lend = tail is not None and not lacking and request.saved is not None
        all_of_it = may_lend or (whole and not lacking)
        end = self._end(lacking, node)
        there = [e for e in wanted if all_of_it or (not e.component and e.node.end <= end)]
        operation = self.served.get(request.id)
        if operation is not None and not _leads_on(operation.last, node):
            # It has begun anew with other tokens, and only one path is pinned for what is served.
            self.withdraw(request)
            operation = None
        if operation is None:
            if (not there and not may_lend) or not self._may_pin(there):
                return 0
            operation = self._begin(request)
        self._deadlines.set(operation, ttl_ms, self._clock.agreed_ms)
        if self._serve(operation, there) and may_lend and tail is not None:
            pages = self._requests.lend_saved(request, operation)
            lent = tail.transfers(self._prefixes.components, pages, sealed=True)
            self._order(operation, lent)
            operation.tail = tail
        if ends:
            # Without what a match needs at the end it ends a page before, at best.
            complete = whole and all(each in operation.segments for each in wanted)
            unit = self._prefixes.tree.page_tokens
            return max(0, min(operation.end, node.end - (not complete))) * unit
        return self._told(operation, node, tail, lacking)

    def _told(
        self, operation: Serving, node: Node, tail: Tail | None, lacking: Sequence[Segment]
    ) -> int:
        """Return how many tokens others can read by now."""
        whole = tail is not None and not lacking and operation.tail == tail
        if tail is not None and whole and operation.end == node.end:
            return tail.tokens
        return self._pages(min(operation.end, node.end), tail)

    def _pages(self, end: int, tail: Tail | None) -> int:
        """Return the tokens up to a position; fewer than all of a tail, which is not to be had yet."""
        unit = self._prefixes.tree.page_tokens
        return end * unit if tail is None or end * unit < tail.tokens else (end - 1) * unit

    def doubt(self, request: Request) -> None:
        """Take nothing of what a request shares, or has saved, for stored."""
        request.stored = 0, b""
        for node in request.node.path() if request.node is not None else ():
            node.persisted = frozenset()
            self._prefixes.residence.changed[node] = None
        self._journal.record("doubt", request.id)

    def withdraw(self, request: Request, outcome: Outcome = Outcome.ABORTED) -> None:
        """Let nobody read any more what is served of a request."""
        operation = self.served.pop(request.id, None)
        if operation is not None:
            self._deadlines.drop(operation)
            self._agenda.stop(operation, outcome)

    def look_after(self) -> None:
        """End the offers whose time is up, with what their requests have saved and lent to them.

        A request that was saved for other reasons, and served no tail, can still resume.
        """
        for operation in self._deadlines.passed(self._clock.agreed_ms):
            request = self._requests.known(operation.request)
            self.withdraw(request, Outcome.EXPIRED)
            if operation.tail is not None and request.stage is Stage.SAVED:
                self._saving.give_up(request)

    def quiet(self, operation: Serving) -> None:
        """Finish what no reader touches any more; a request that is still saved has its tail back."""
        self._requests.take_back(operation)
        self._agenda.finish(operation)

    def _last(self, request: Request, tokens: bytes) -> Node | None:
        """Return the node with which the whole pages of `tokens` end, as far as they are cached.

        None where there is nothing to offer.
        """
        if not request.admitted or request.given_up or not tokens:
            return None
        root = self._prefixes.root(request.place)
        nodes = self._prefixes.walk_to(root, tokens)
        return nodes[-1] if nodes else root

    def _tail(self, request: Request, node: Node, tokens: bytes) -> Tail | None:
        """Return the tail of a request that is saved with all of `tokens`, None for any other."""
        tree = self._prefixes.tree
        saved = request.stage is Stage.SAVED and request.computed * TOKEN_BYTES == len(tokens)
        if not saved or node.end != tree.whole_pages(tokens):
            return None
        return tail_of(self._prefixes.components, tree.keys(node)[-1], tokens, tree.page_bytes)

    def _segments(self, node: Node, components: Sequence[Component]) -> list[Segment]:
        """Return what others have to read for a prefix, and of other `components` to go on there."""
        if components:
            self._prefixes.cut_for(node)
        wanted = [Segment(each, 0) for each in node.path_down()]
        for component in components[1:]:
            nodes = [*needed(component, node)]
            wanted += [Segment(each, component.index) for each in reversed(nodes)]
        return wanted

    def _wanted(
        self, node: Node, components: Sequence[Component]
    ) -> tuple[list[Segment], list[Segment]]:
        """Return what others have to read, see `_segments`, and what of it is not on the host."""
        wanted = self._segments(node, components)
        return wanted, [each for each in wanted if each.node.values[HOST][each.component] is None]

    def _bring_to_host(self, request: Request, node: Node, lacking: Sequence[Segment]) -> bool:
        """Back up what of the path to `node` is not on the host, whatever the write policy.

        As far as the device has it: the path may be another request's, and its pages evicted. Returns
        whether nodes of the path may have been cut for that.
        """
        off = any(node.values[HOST][index] is None for node, index in lacking)
        if not off or not self._owns_device or request.stage is not Stage.READY:
            return False
        last: Node | None = None
        for each in node.path_down():
            if each.values[HOST][0] is None and each.values[DEVICE][0] is None:
                break
            last = each
        if last is not None:
            # An offer is asked for in every step, and what it lacks room for is told once.
            tells = request.offered != last.end
            self._backing_up.write_through(last, tells=tells, passes=False)
            request.offered = last.end
        return last is not None

    def _end(self, lacking: Sequence[Segment], last: Node) -> int:
        """Return up to which position full attention is not lacking, of the path to `last`."""
        return min((each.node.start for each in lacking if not each.component), default=last.end)

    def _begin(self, request: Request) -> Serving:
        operation = Serving(components=self._prefixes.components, request=request.id)
        self.served[request.id] = operation
        self._agenda.begin(operation, request.id)
        return operation

    def _serve(self, operation: Serving, wanted: Sequence[Segment]) -> bool:
        """Serve what is wanted and is not served yet; False if host memory must not pin so much."""
        new = [each for each in wanted if each not in operation.segments]
        if not new:
            return True
        if not self._may_pin(new):
            return False
        for component in self._prefixes.components:
            nodes = [each.node for each in new if each.component == component.index]
            if nodes:
                self._pin(operation, component, nodes)
        for each in new:
            operation.segments[each] = page_run()
        operation.mark()
        self._order(operation, [self._persisting.transfer(each) for each in new])
        return True

    def _pin(self, operation: Serving, component: Component, nodes: Sequence[Node]) -> None:
        """Pin what is served anew of a component, beside what is served of it at other ends."""
        holds, index = self._prefixes.residence.holds, component.index
        before = [] if index or operation.last is None else [operation.last]
        last = max([*nodes, *before], key=lambda node: node.end)
        start = min(node.start for node in nodes)
        receipts = [*operation.receipts, holds.acquire(HOST, index, last, start)]
        if not index:
            # One receipt down to the farthest end keeps all of the path.
            operation.last = last
            for each in [each for each in operation.receipts if not each.component]:
                receipts.remove(each)
                holds.release(each)
        operation.receipts = receipts

    def _order(self, operation: Serving, transfers: Sequence[ObjectTransfer]) -> None:
        if transfers:
            pools = [f"{each.pool} {len(each.keys)}" for each in transfers]
            self._journal.record("serve", operation.id, *pools)
            self._agenda.serve(operation, transfers)

    def _may_pin(self, new: Sequence[Segment]) -> bool:
        """Say whether host memory keeps enough that can leave if these are pinned as well."""
        residence = self._prefixes.residence
        for component in self._prefixes.components:
            index = component.index
            nodes = [node for node, each in new if each == index and not node.held[HOST][index]]
            more = sum(component.pages_of(node.width) for node in nodes)
            kept, most = (
                residence.holds.kept_pages[HOST][index],
                residence.pools[HOST][index].capacity,
            )
            # Of a small pool one end alone may be more than the share.
            alone = index and not kept
            if more and not alone and PINNED_SHARE_MAX * most < kept + more:
                return False
        return True


def _leads_on(served: Node | None, node: Node) -> bool:
    """Say whether what is served and what ends at `node` are one path, however far each goes."""
    if served is None or node.parent is None:
        return True
    last, first = (served, node) if served.end > node.end else (node, served)
    return any(each is first for each in last.path())


def _is_idle(segment: Segment) -> bool:
    """Say whether a segment is on the host, and no write of it to the store is in flight."""
    node, component = segment
    there = node.values[HOST][component] is not None
    return there and not any(_writes(mark, segment) for mark in node.marks)


def _writes(mark: object, segment: Segment) -> bool:
    return isinstance(mark, Persist) and segment in mark.segments
