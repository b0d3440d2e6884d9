"""The replicated state, and the few steps in which it may change.

Everything that the parts of the replica share: the tree, the pools, locks and pins, operations,
requests, the logical clock and agreed time. Each step keeps the counts that the others rely on.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...coordinator.operation import Outcome, Phase, Queue
from ...coordinator.stop_policy import StopPolicy
from ...errors import InternalError, UsageError
from ..config import Bounds, CacheConfig, Timeouts
from ..orders import Cancel, Order
from .components.full_attention import FullAttention
from .eviction import LeastRecentlyUsed
from .holds import Holds
from .journal import Journal
from .operations import Copy, Operation, OperationTable, Persist, Segment
from .page_keys import namespace_seed, page_keys
from .pages import PagePool, PageRun
from .request import Request, Shortfall
from .tree import DEVICE, HOST, Node, Place, Tree


class Expectations(Protocol):
    """What the replica tells this rank's ballot; it never asks it anything."""

    def expect(self, operation: int) -> None:
        """Begin to note progress of `operation`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """What the replica needs to know; equal on every rank."""

    page_tokens: int
    device_pages: int
    """0: the engine owns the device's pages."""
    host_pages: int
    has_store: bool
    model_digest: bytes
    """Stands for everything that must agree before pages may be shared; starts every key."""
    life: bytes = b""
    """Drawn when the cache was opened; keys after a `reset` are this life's alone."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    bounds: Bounds = field(default_factory=Bounds)
    timeouts: Timeouts = field(default_factory=Timeouts)

    @classmethod
    def of(
        cls,
        config: CacheConfig,
        *,
        device_pages: int,
        host_pages: int,
        model_digest: bytes,
        life: bytes = b"",
    ) -> "ReplicaConfig":
        """Return the replica's part of a cache's settings, with the agreed pool sizes."""
        return cls(
            page_tokens=config.layout.page_tokens,
            device_pages=device_pages,
            host_pages=host_pages,
            has_store=config.store is not None,
            model_digest=model_digest,
            life=life,
            stop_policy=config.stop_policy,
            bounds=config.bounds,
            timeouts=config.timeouts,
        )

    @property
    def prefetch_pages_max(self) -> int:
        """Host pages that all prefetches together may ask for."""
        bound = self.bounds.prefetch_pages
        return max(1, self.host_pages // 2) if bound is None else bound

    @property
    def quarantine_pages_max(self) -> int:
        """Pages that may be quarantined before the store is detached."""
        bound = self.bounds.quarantine_pages
        return self.host_pages // 4 if bound is None else bound


class ReplicaState:
    """The state and its elementary steps. Commands and verdicts are handled by others."""

    def __init__(self, config: ReplicaConfig, expectations: Expectations) -> None:
        self.config = config
        self.ballot = expectations
        self.journal = Journal()
        self.component = FullAttention()
        self.tree = Tree(config.page_tokens, (self.component,))
        self.pools = (
            PagePool("device", config.device_pages, self.journal),
            PagePool("host", config.host_pages, self.journal),
        )
        self.tree_pages = [0, 0]
        """By tier: pages that nodes of the tree own."""
        self.eviction = (
            LeastRecentlyUsed(DEVICE, lambda node: self.evictable(node, DEVICE)),
            LeastRecentlyUsed(HOST, lambda node: self.evictable(node, HOST)),
        )
        self.holds = Holds(self._offer)
        self.operations = OperationTable()
        self.requests: dict[str, Request] = {}
        self.requests_in: Counter[Place] = Counter()
        """How many requests each place has; a place without any is not there."""
        self.generation = 0
        """How often everything was dropped by `reset`."""
        self.orders: list[Order] = []
        self.notices: list[Shortfall] = []
        self.clock = 0
        """Logical time: one more for each command that uses pages."""
        self.time_ms = 0
        """Agreed time."""
        self.store_attached = config.has_store and config.host_pages > 0
        self.quarantined_pages = 0
        self.misses: OrderedDict[bytes, int] = OrderedDict()
        """Keys whose read failed, and until when, in agreed time, they are not asked for again."""

    @property
    def engine_owns_device(self) -> bool:
        """Whether device pages are the engine's, and lent for copies (rule R3)."""
        return not self.config.device_pages

    def place(self, namespace: str) -> Place:
        """Return the place of a namespace since the last reset."""
        return Place(namespace, self.generation)

    def root(self, place: Place) -> Node:
        """Return the root of a place, which is made at its first use."""
        existing = self.tree.roots.get(place)
        if existing is not None:
            return existing
        config = self.config
        return self.tree.plant(place, namespace_seed(config.model_digest, *place, config.life))

    def enter(self, name: str, namespace: str) -> Request:
        """Make a request known."""
        request = Request(name, self.place(namespace))
        self.requests[name] = request
        self.requests_in[request.place] += 1
        self.journal.record("request", name, namespace)
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

    def reset(self) -> None:
        """Offer nothing of what is cached now to any request that is not admitted yet."""
        self.generation += 1
        self.journal.record("reset", self.generation)
        self.misses.clear()
        for request in self.requests.values():
            if not request.admitted:
                self.move(request)
        for tier in (DEVICE, HOST):
            while (victim := self.eviction[tier].next_victim()) is not None:
                self._evict(victim, tier)

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

    def tick(self) -> None:
        """Advance the logical clock."""
        self.clock += 1

    def touch(self, node: Node) -> None:
        """Mark the path to `node` as used now."""
        for each in node.path():
            each.last_access = self.clock

    def evictable(self, node: Node, tier: int) -> bool:
        """Say whether a node's pages on `tier` may leave: a leaf of its tier that nobody holds.

        A node that would lose its last copy must also be free of pins, which keep its place.
        """
        if node.parent is None or node.values[tier][0] is None or node.occupied_children[tier]:
            return False
        if node.holds(tier):
            return False
        return node.values[1 - tier][0] is not None or not node.holds(1 - tier)

    def available(self, tier: int) -> int:
        """Return how many pages `take` can find: free ones, and those that may be evicted."""
        return self.pools[tier].free + self.tree_pages[tier] - self.holds.kept_pages[tier]

    def take(self, tier: int, count: int) -> PageRun | None:
        """Take `count` pages, evicting what was used longest ago.

        None if there are not so many to be had; then nothing was evicted.
        """
        pool = self.pools[tier]
        if count > self.available(tier):
            return None
        while pool.free < count:
            victim = self.eviction[tier].next_victim()
            if victim is None:
                raise InternalError(f"{pool.name} pages that could be evicted are miscounted")
            surplus = victim.width - (count - pool.free)
            if surplus > 0:
                self.split(victim, surplus)
            self._evict(victim, tier)
        return pool.take(count)

    def attach(self, node: Node, tier: int, pages: PageRun) -> None:
        """Give a node its pages on `tier`; they belong to it from now on."""
        if node.values[tier][0] is not None or len(pages) != node.width or node.parent is None:
            raise InternalError(f"node {node.id} cannot take {len(pages)} pages on tier {tier}")
        node.values[tier][0] = pages
        node.parent.occupied_children[tier] += 1
        self.tree_pages[tier] += node.width
        self.holds.value_changed(node, tier, node.width)
        self.eviction[tier].offer(node)
        # A second copy makes the first one dispensable, also where it was the last one before.
        self.eviction[1 - tier].offer(node)

    def detach(self, node: Node, tier: int) -> PageRun:
        """Take a node's pages on `tier` away from it; they belong to the caller from now on."""
        pages = node.values[tier][0]
        assert pages is not None
        assert node.parent is not None
        node.values[tier][0] = None
        node.parent.occupied_children[tier] -= 1
        self.tree_pages[tier] -= node.width
        self.holds.value_changed(node, tier, -node.width)
        self.eviction[tier].offer(node.parent)
        return pages

    def remove_if_dead(self, node: Node) -> bool:
        """Take a node out of the tree that has pages on no tier; say whether it had none."""
        if node.parent is None or node.children:
            return False
        if node.values[DEVICE][0] is not None or node.values[HOST][0] is not None:
            return False
        parent = node.parent
        self.tree.remove(node)
        self._drop_root_if_unused(parent)
        return True

    def prune(self, node: Node) -> None:
        """Take out of the tree what of the path to `node` has no pages, no children and no holds."""
        while node.parent is not None and not (node.holds(DEVICE) or node.holds(HOST)):
            parent = node.parent
            if not self.remove_if_dead(node):
                return
            node = parent

    def split(self, node: Node, pages: int) -> None:
        """Cut a node after its first `pages` pages; operations that refer to it keep both halves."""
        upper = self.tree.split(node, pages)
        for number in node.marks:
            operation = self.operations.in_flight[number]
            if isinstance(operation, Copy | Persist):
                _split_segments(operation.segments, node, upper)

    def walk_to(self, root: Node, tokens: bytes) -> list[Node]:
        """Return the nodes that hold `tokens`, as far as they are in the tree, cut to fit."""
        walk = self.tree.walk(root, tokens)
        nodes = list(walk.nodes)
        if walk.partial is not None:
            self.split(walk.partial, walk.partial_pages)
            upper = walk.partial.parent
            assert upper is not None
            nodes.append(upper)
        return nodes

    def stop(self, operation: Operation, outcome: Outcome) -> None:
        """Stop an operation whose I/O may still run: its pages wait in QUIESCE.

        From here on it has no part in the tree but its receipts: its own pages belong to it alone.
        """
        operation.ending = outcome
        if isinstance(operation, Copy | Persist):
            operation.stopped_pages = sum(len(segment.pages) for segment in operation.segments)
            if isinstance(operation, Copy):
                for segment in operation.segments:
                    operation.owned[operation.fills].extend(segment.pages)
            self._clear_segments(operation)
        self.advance(operation, Phase.QUIESCE)
        self.orders.append(Cancel(operation.id, self.config.timeouts.quiesce_s))
        ticket = self.operations.new_ticket(Queue.QUIESCE, operation)
        self.ballot.enqueue(Queue.QUIESCE, ticket, operation.id)

    def advance(self, operation: Operation, phase: Phase) -> None:
        """Change an operation's phase, on the record."""
        self.operations.advance(operation, phase)
        self.journal.record("phase", operation.kind.name, operation.id, phase.name)

    def release_receipts(self, operation: Operation) -> None:
        """Give back the locks and pins of an operation, and what only they kept in the tree."""
        for receipt in operation.receipts:
            self.holds.release(receipt)
            self.prune(receipt.node)
        operation.receipts.clear()

    def finish(self, operation: Operation, outcome: Outcome) -> None:
        """End an operation: whatever it still owns and holds is given back."""
        self.advance(operation, Phase.DONE)
        self.release_receipts(operation)
        for tier in (DEVICE, HOST):
            self.pools[tier].give_back(operation.owned_pages(tier))
        if isinstance(operation, Copy | Persist):
            self._clear_segments(operation)
        self.operations.outcomes[operation.kind, outcome] += 1
        del self.operations.in_flight[operation.id]
        self.ballot.forget(operation.id)

    def _offer(self, node: Node) -> None:
        for queue in self.eviction:
            queue.offer(node)

    def _evict(self, victim: Node, tier: int) -> None:
        pool = self.pools[tier]
        self.journal.record("evict", pool.name, victim.id, victim.start, victim.end)
        pool.give_back(self.detach(victim, tier))
        self.remove_if_dead(victim)

    def _leave_place(self, place: Place) -> None:
        self.requests_in[place] -= 1
        if not self.requests_in[place]:
            del self.requests_in[place]
        root = self.tree.roots.get(place)
        if root is not None:
            self._drop_root_if_unused(root)

    def _drop_root_if_unused(self, node: Node) -> None:
        # Salts may be as many as requests, and a root for each would grow without bound.
        unused = not node.children and node.place not in self.requests_in
        if node.parent is None and unused and self.tree.roots.get(node.place) is node:
            del self.tree.roots[node.place]

    def _clear_segments(self, operation: Copy | Persist) -> None:
        for segment in operation.segments:
            segment.node.marks.discard(operation.id)
        operation.segments.clear()

    def mark(self, operation: Copy | Persist, segments: Sequence[Segment]) -> None:
        """Enter the segments of an operation and mark their nodes with it."""
        operation.segments.extend(segments)
        for segment in segments:
            segment.node.marks.add(operation.id)


def _split_segments(segments: list[Segment], lower: Node, upper: Node) -> None:
    for index, segment in enumerate(segments):
        if segment.node is lower:
            cut = upper.width
            segments[index : index + 1] = [
                Segment(upper, segment.pages[:cut]),
                Segment(lower, segment.pages[cut:]),
            ]
            return
