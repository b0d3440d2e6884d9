"""The replicated state, and the few steps in which it may change.

Everything that the parts of the replica share: the tree, where pages are, operations, requests, the
logical clock and agreed time. Each step keeps the counts that the others rely on.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from ...coordinator.operation import Outcome, Phase, Queue
from ...coordinator.seats import Seats
from ...errors import UsageError
from ..orders import Cancel, Order
from .components.needs import Needs
from .journal import Journal
from .operations import Copy, Operation, OperationTable, Segment
from .page_keys import namespace_seed, page_keys
from .pages import PagePool
from .request import Request, Shortfall
from .residence import TIERS, Residence
from .settings import ReplicaConfig
from .tokens import TOKEN_BYTES, token_hash
from .tree import Node, Place, Tree

_DONE = Phase.DONE

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """How a proposal has ended, on every rank."""

    proposal: int | None
    """Its digest; None stands for whatever a rank has staged."""
    withdrawn: str | None = None
    """Why nothing came of it; None if it was done."""
    refused_rank: int | None = None
    """The rank that `withdrawn` speaks of, which knows more of it; None if it is not of one rank."""


def require_name(what: str, name: object) -> None:
    """Raise `UsageError` for the name of a request or a pin that is no text."""
    if not isinstance(name, str):
        raise UsageError(f"the name of a {what} must be text, not {name!r}")


class Expectations(Protocol):
    """What the replica tells this rank's ballot; it never asks it anything."""

    def seat(self, operation: int, seat: int, phase: Phase, bound: int) -> None:
        """Let the lanes of `seat` speak of `operation` from now on, and mean this."""
        ...

    def unseat(self, operation: int) -> None:
        """Let the seat of `operation` say nothing any more."""
        ...

    def enqueue(self, queue: Queue, ticket: int, operation: int) -> None:
        """Put `operation` at the end of a watermark queue."""
        ...

    def settle(self, queue: Queue, ticket: int) -> None:
        """Drop the queue's tickets up to `ticket`: their outcome is agreed."""
        ...

    def forget(self, operation: int) -> None:
        """Drop what was seen of `operation`."""
        ...


class ReplicaState:
    """The state and its elementary steps. Commands and verdicts are handled by others."""

    def __init__(self, config: ReplicaConfig, expectations: Expectations) -> None:
        self.config = config
        self.ballot = expectations
        self.journal = Journal()
        self.components = config.make_components()
        self.needs = Needs(self.components)
        self._alone = tuple(frozenset((each.index,)) for each in self.components)
        """Each component as a set, which many nodes share."""
        self.tree = Tree(config.page_tokens, self.components)
        self.residence = Residence(
            config,
            self.tree,
            self.journal,
            split=self.split,
            emptied=self.drop_root_if_unused,
        )
        self.operations = OperationTable()
        self.seats = Seats(config.bounds.prefetches)
        self.requests: dict[str, Request] = {}
        self.requests_in: Counter[Place] = Counter()
        """How many requests each place has; a place without any is not there."""
        self.generation = 0
        """How often everything was dropped by `reset`."""
        self.weights_version: str | None = None
        """What the last reset named."""
        self.orders: list[Order] = []
        self.notices: list[Shortfall] = []
        self.clock = 0
        """Logical time: one more for each command that uses pages."""
        self.time_ms = 0
        """Agreed time."""
        self.store_attached = config.has_store and config.host_pages > 0
        self.store_draining = False
        """The store is detached, and something is still in flight for it."""
        self.store_number = int(self.store_attached)
        """How many stores there have been; what nodes know of one says nothing of the next."""
        self.lost: str | None = None
        """Why no rank can go on, in the same words on all of them; None while they can."""
        self._first_of_store = 0
        """The first operation that can have to do with that store."""
        self.proposal: int | None = None
        """The digest of what some rank has staged, as far as a verdict has told."""
        self.proposed_ms = 0
        """Since when, in agreed time."""
        self.decisions: list[Decision] = []
        self.misses: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        """Objects, by pool and key, whose read failed, and until when, in agreed time, they are not
        asked for again."""

    @property
    def pools(self) -> tuple[tuple[PagePool, ...], ...]:
        """The pools by tier and component."""
        return self.residence.pools

    @property
    def engine_owns_device(self) -> bool:
        """Whether device pages are the engine's, and lent for copies (rule R3)."""
        return not self.config.device_pages

    def place(self, namespace: str) -> Place:
        """Return the place of a namespace since the last reset."""
        return Place(namespace, self.generation, self.weights_version)

    def root(self, place: Place) -> Node:
        """Return the root of a place, which is made at its first use."""
        existing = self.tree.roots.get(place)
        if existing is not None:
            return existing
        config, (namespace, generation, version) = self.config, place
        seed = namespace_seed(config.model_digest, namespace, generation, config.life, version)
        return self.tree.plant(place, seed)

    def enter(self, name: str, namespace: str) -> Request:
        """Make a request known."""
        require_name("request", name)
        # Errors show entries, and a namespace may have a tenant's salt in it.
        self.journal.record("request", name, sha256(namespace.encode()).hexdigest()[:16])
        request = Request(name, self.place(namespace), len(self.components))
        self.requests[name] = request
        self.requests_in[request.place] += 1
        return request

    def leave(self, request: Request) -> None:
        """Forget a request, which holds nothing any more."""
        del self.requests[request.id]
        self._leave_place(request.place)

    def move(self, request: Request) -> None:
        """Let a request that is not admitted use its namespace's place since the last reset."""
        before, request.place = request.place, self.place(request.place.namespace)
        self.requests_in[request.place] += 1
        self._leave_place(before)

    def keeps(self, place: Place) -> bool:
        """Say whether what is cached in a place is worth reading from storage and writing there.

        Not where another life could not find it; nor what was computed before the last reset, which
        requests in flight may go on with under other weights than those that its keys stand for.
        """
        return place.generation == self.generation and place.outlives

    def reset(self, weights_version: str | None) -> None:
        """Offer nothing of what is cached now to any request that is not admitted yet."""
        self.journal.record("reset", self.generation + 1, weights_version)
        self.generation += 1
        self.weights_version = weights_version
        self.misses.clear()
        for request in self.requests.values():
            if not request.admitted:
                self.move(request)
        for tier in TIERS:
            self.residence.evict_everything(tier)

    def page_keys(self, seed: bytes, tokens: bytes) -> list[bytes]:
        """Return the keys of the whole pages of `tokens`, which follow the page with key `seed`."""
        return page_keys(seed, tokens, self.config.page_tokens)

    def request(self, name: str) -> Request:
        """Return a request that the engine has told of."""
        try:
            return self.requests[name]
        except KeyError:
            raise UsageError(
                f"request {name!r} is not known; prefetch or load back first"
            ) from None

    def witness_tokens(self, command: str, name: str, tokens: bytes) -> None:
        """Let the digest cover the tokens that a command brings for a request or a pin (rule R2).

        Ranks whose engines have sampled other tokens of equal count are told apart by it in the next
        round, and not by an answer that differs some day.
        """
        count = len(tokens) // TOKEN_BYTES
        self.journal.record("tokens", command, name, count, token_hash(tokens))

    def tick(self) -> None:
        """Advance the logical clock."""
        self.clock += 1

    def use(self, node: Node) -> None:
        """Mark the path to `node` as used now."""
        self.residence.touch(node, self.clock, self.time_ms)

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Hang a new node, used now, with a run of whole pages under `parent`."""
        node = self.tree.add(parent, tokens)
        node.last_access, node.used_ms = self.clock, self.time_ms
        return node

    def split(self, node: Node, pages: int) -> None:
        """Cut a node after its first `pages` pages; operations that refer to it keep both halves."""
        upper = self.tree.split(node, pages)
        self.residence.was_split(upper)
        for number in sorted(node.marks):
            operation = self.operations.in_flight[number]
            self._split_segments(operation, node, upper)

    def begin_store(self) -> None:
        """Attach another store. What those before keep in quarantine is not held against it."""
        self.store_attached = True
        self.store_number += 1
        self._first_of_store = self.operations.next_id
        # They tell what the store before did not have.
        self.misses.clear()

    def is_of_store(self, operation: Operation) -> bool:
        """Say whether an operation has to do with the present store, or the last one."""
        return operation.id >= self._first_of_store

    def is_persisted(self, node: Node, component: int) -> bool:
        """Say whether the present store has a node's pages of a component, as far as is known."""
        return node.store == self.store_number and component in node.persisted

    def offer(self, node: Node, component: int | None = None) -> None:
        """Note that a node was offered to the present store, and if so, which component it has."""
        has = _NONE if component is None else self._alone[component]
        if node.store != self.store_number:
            node.store, node.persisted = self.store_number, has
        elif has:
            node.persisted |= has

    def cut(self, node: Node, position: int) -> None:
        """Make sure that some node of the path to `node` begins at `position`."""
        for each in node.path():
            if each.start < position < each.end:
                self.split(each, position - each.start)
                return
            if each.start <= position:
                return

    def cut_for(self, node: Node) -> None:
        """Cut the path where the components' needs of a match that ends at `node` begin."""
        for component in self.components:
            start = component.needed_from(node.end)
            if start and component.per_page:
                self.cut(node, start)

    def walk_to(self, root: Node, tokens: bytes) -> list[Node]:
        """Return the nodes that hold `tokens`, as far as they are in the tree, cut to fit."""
        nodes, partial, pages = self.tree.follow(root, tokens)
        if partial is not None:
            self.split(partial, pages)
            upper = partial.parent
            assert upper is not None
            nodes.append(upper)
        return nodes

    def stop(self, operation: Operation, outcome: Outcome) -> None:
        """Stop an operation whose I/O may still run: its pages wait in QUIESCE.

        From here on it has no part in the tree but its receipts: its own pages belong to it alone.
        """
        operation.ending = outcome
        if isinstance(operation, Copy):
            for segment in operation.segments:
                operation.own(operation.fills, segment.component, segment.pages)
        self._clear_segments(operation)
        self.advance(operation, Phase.QUIESCE)
        self.orders.append(Cancel(operation.id, self.config.timeouts.quiesce_s))
        ticket = self.operations.new_ticket(Queue.QUIESCE, operation)
        self.ballot.enqueue(Queue.QUIESCE, ticket, operation.id)

    def advance(self, operation: Operation, phase: Phase) -> None:
        """Change an operation's phase, on the record."""
        self.operations.advance(operation, phase)
        self.journal.record("phase", operation.kind.word, operation.id, phase.word)

    def release_receipts(self, operation: Operation) -> None:
        """Give back the locks and pins of an operation, and what only they kept in the tree."""
        residence, receipts = self.residence, operation.receipts
        for receipt in receipts:
            residence.holds.release(receipt)
        for receipt in receipts:
            residence.prune(receipt.node)
        receipts.clear()

    def finish(self, operation: Operation, outcome: Outcome) -> None:
        """End an operation: whatever it still owns and holds is given back."""
        self.advance(operation, _DONE)
        self.release_receipts(operation)
        if operation.owns_pages:
            for tier in TIERS:
                for component in self.components:
                    pages = operation.owned_pages(tier, component.index)
                    self.residence.pools[tier][component.index].give_back(pages)
        if operation.segments:
            self._clear_segments(operation)
        self.operations.outcomes[operation.kind, outcome] += 1
        del self.operations.in_flight[operation.id]
        self.ballot.forget(operation.id)

    def mark(self, operation: Operation, segments: Sequence[Segment]) -> None:
        """Enter the segments of an operation and mark their nodes with it."""
        operation.segments.extend(segments)
        for segment in segments:
            segment.node.marks |= {operation.id}
            operation.touched.add((segment.node, segment.component))

    def fills(self, node: Node, tier: int, component: int) -> bool:
        """Say whether a copy in flight fills a node's pages of a component on a tier."""
        for number in node.marks:
            operation = self.operations.in_flight[number]
            if (
                isinstance(operation, Copy)
                and operation.fills == tier
                and (node, component) in operation.touched
            ):
                return True
        return False

    def _leave_place(self, place: Place) -> None:
        self.requests_in[place] -= 1
        if not self.requests_in[place]:
            del self.requests_in[place]
        root = self.tree.roots.get(place)
        if root is not None:
            self.drop_root_if_unused(root)

    def drop_root_if_unused(self, node: Node) -> None:
        """Forget a root that has no children and whose place has no requests."""
        # Salts may be as many as requests, and a root for each would grow without bound.
        unused = not node.children and node.place not in self.requests_in
        if node.parent is None and unused and self.tree.roots.get(node.place) is node:
            del self.tree.roots[node.place]

    def _clear_segments(self, operation: Operation) -> None:
        for segment in operation.segments:
            segment.node.marks -= {operation.id}
        operation.segments.clear()
        operation.touched.clear()

    def _split_segments(self, operation: Operation, lower: Node, upper: Node) -> None:
        segments: list[Segment] = []
        for segment in operation.segments:
            if segment.node is not lower:
                segments.append(segment)
                continue
            component = self.components[segment.component]
            above, below = component.split(segment.pages, upper.width)
            if above is not None:
                segments.append(Segment(upper, segment.component, above))
            if below is not None:
                segments.append(Segment(lower, segment.component, below))
        operation.segments[:] = segments
        operation.touched = {(segment.node, segment.component) for segment in segments}
        if not any(segment.node is upper for segment in segments):
            upper.marks -= {operation.id}
