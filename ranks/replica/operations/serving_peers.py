"""Serving: host pages that other groups may read, pinned on every rank until the lease expires.

Each call of `serve` returns how much of the prefix can be read by now, according to verdicts. Full
attention can be read once it is in host memory. Once it is there for all whole pages of the prefix, the
windows and states that a match at the end of the prefix needs follow. A request may be served for
several prefixes, each with windows and states at its end.
"""

from collections.abc import Sequence

from ....coordinator.operation import Outcome
from ..core.deadlines import AgreedDeadlines
from ..core.pages import page_run
from ..core.replica_parts import ReplicaParts
from ..tree.components import Component
from ..tree.node import DEVICE, HOST, Node, needed
from ..tree.prefixes import Prefixes
from .backing_up import BackingUp
from .kinds import Segment, Serving
from .operation_table import OperationTable
from .persisting import Persisting
from .requests import Request, Requests, Stage

PINNED_SHARE_MAX = 0.75
"""Serving pins no further pages of a host pool if more than this share of the pool would then be
pinned."""


class ServingPeers:
    """Serves host pages of requests to other groups."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        requests: Requests,
        backing_up: BackingUp,
        persisting: Persisting,
    ) -> None:
        self._owns_device = basis.config.device_pages > 0
        self._clock = basis.clock
        self._journal = basis.journal
        self._prefixes = prefixes
        self._operation_table = operation_table
        self._requests = requests
        self._backing_up = backing_up
        self._persisting = persisting
        self.served: dict[str, Serving] = {}
        """By request name: the operation that serves its pages."""
        self._deadlines: AgreedDeadlines[Serving] = AgreedDeadlines()

    def serve(self, request: Request, tokens: bytes, ttl_ms: int) -> int:
        """Let other groups read the whole pages of `tokens`; return how many tokens are readable now.

        Includes the windows and states that a match at the end of `tokens` needs.
        """
        node = self._last(request, tokens)
        current = self._requests.is_current(request.place) and request.place.outlives
        if node is None or not current:
            return 0
        self._requests.digest_tokens("serve", request.id, tokens, ttl_ms)
        whole = node.end == self._prefixes.tree.whole_pages(tokens)
        wanted, lacking = self._wanted(node, whole=whole)
        if self._bring_to_host(request, node, lacking):
            # List the segments again, because the backup may have split nodes.
            wanted, lacking = self._wanted(node, whole=whole)
        all_of_it = whole and not lacking
        end = self._end(lacking, node)
        there = [e for e in wanted if all_of_it or (not e.component and e.node.end <= end)]
        operation = self.served.get(request.id)
        if operation is not None and not _leads_on(operation.last, node):
            # Stop serving the old path. The request has started again with other tokens, and only one
            # path per request is pinned.
            self.stop(request)
            operation = None
        if operation is None:
            if not there or not self._may_pin(there):
                return 0
            operation = self._begin(request)
        self._deadlines.set(operation, ttl_ms, self._clock.agreed_ms)
        self._serve(operation, there)
        # Other groups cannot end a match at `node` unless the windows and states needed there are
        # served, too. If they are not, do not count the last page.
        complete = whole and all(each in operation.segments for each in wanted)
        unit = self._prefixes.tree.page_tokens
        return max(0, min(operation.end, node.end - (not complete))) * unit

    def stop(self, request: Request, outcome: Outcome = Outcome.ABORTED) -> None:
        """Stop serving a request."""
        operation = self.served.pop(request.id, None)
        if operation is not None:
            self._deadlines.drop(operation)
            self._operation_table.stop(operation, outcome)

    def look_after(self) -> None:
        """Stop serving requests whose lease has expired."""
        for operation in self._deadlines.passed(self._clock.agreed_ms):
            self.stop(self._requests.known(operation.request), Outcome.EXPIRED)

    def quiet(self, operation: Serving) -> None:
        """Finish a stopped serving operation whose pages no reader touches any more."""
        self._operation_table.finish(operation)

    def _last(self, request: Request, tokens: bytes) -> Node | None:
        """Return the last node of the cached prefix of `tokens`.

        Returns None if the request is not admitted or has no tokens.
        """
        if not request.admitted or not tokens:
            return None
        root = self._prefixes.root(request.place)
        nodes = self._prefixes.walk_to(root, tokens)
        return nodes[-1] if nodes else root

    def _wanted(self, node: Node, *, whole: bool) -> tuple[list[Segment], list[Segment]]:
        """Return (wanted, lacking): the segments to serve, and those of them that are not on the host.

        A segment is a node and a component. The full attention of the path to `node` is always wanted.
        With `whole`, so are the windows and states that a match at the end of the prefix needs.
        """
        if whole:
            self._prefixes.cut_for(node)
        wanted = [Segment(each, 0) for each in node.path_down()]
        for component in self._prefixes.components[1:] if whole else ():
            nodes = [*needed(component, node)]
            wanted += [Segment(each, component.index) for each in reversed(nodes)]
        return wanted, [each for each in wanted if each.node.values[HOST][each.component] is None]

    def _bring_to_host(self, request: Request, node: Node, lacking: Sequence[Segment]) -> bool:
        """Back up the part of the path to `node` that is not on the host, under any write policy.

        Stops at pages that the device lacks. Returns whether nodes of the path may have been split.
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
            # `serve` is called in every step, so report only the first time that host memory has no
            # room.
            is_first = request.served_to != last.end
            self._backing_up.write_through(last, reports=is_first, passes=False)
            request.served_to = last.end
        return last is not None

    def _end(self, lacking: Sequence[Segment], last: Node) -> int:
        return min((each.node.start for each in lacking if not each.component), default=last.end)

    def _begin(self, request: Request) -> Serving:
        operation = Serving(components=self._prefixes.components, request=request.id)
        self.served[request.id] = operation
        self._operation_table.begin(operation, request.id)
        return operation

    def _serve(self, operation: Serving, wanted: Sequence[Segment]) -> None:
        new = [each for each in wanted if each not in operation.segments]
        if not new or not self._may_pin(new):
            return
        for component in self._prefixes.components:
            nodes = [each.node for each in new if each.component == component.index]
            if nodes:
                self._pin(operation, component, nodes)
        for each in new:
            operation.segments[each] = page_run()
        operation.mark()
        transfers = [self._persisting.transfer(each) for each in new]
        pools = [f"{each.pool} {len(each.keys)}" for each in transfers]
        self._journal.record("serve", operation.id, *pools)
        self._operation_table.serve(operation, transfers)

    def _pin(self, operation: Serving, component: Component, nodes: Sequence[Node]) -> None:
        ref_counts, index = self._prefixes.allocator.ref_counts, component.index
        before = [] if index or operation.last is None else [operation.last]
        last = max([*nodes, *before], key=lambda node: node.end)
        start = min(node.start for node in nodes)
        lock_handles = [*operation.lock_handles, ref_counts.acquire(HOST, index, last, start)]
        if not index:
            # Replace the full-attention lock handles by a single one. It ends at the farthest node and
            # covers the whole path.
            operation.last = last
            for each in [each for each in operation.lock_handles if not each.component]:
                lock_handles.remove(each)
                ref_counts.release(each)
        operation.lock_handles = lock_handles

    def _may_pin(self, new: Sequence[Segment]) -> bool:
        """Return whether enough of host memory stays evictable if these segments are pinned as well."""
        allocator = self._prefixes.allocator
        for component in self._prefixes.components:
            index = component.index
            nodes = [node for node, each in new if each == index and not node.held[HOST][index]]
            more = sum(component.pages_of(node.width) for node in nodes)
            kept, most = (
                allocator.ref_counts.kept_pages[HOST][index],
                allocator.pools[HOST][index].capacity,
            )
            # In a small pool, the windows or states for one match may exceed the share that may be
            # pinned. Allow them if nothing else of the pool is pinned.
            alone = index and not kept
            if more and not alone and PINNED_SHARE_MAX * most < kept + more:
                return False
        return True


def _leads_on(served: Node | None, node: Node) -> bool:
    """Return whether one of two paths, the served one and that to `node`, is a prefix of the other."""
    if served is None or node.parent is None:
        return True
    last, first = (served, node) if served.end > node.end else (node, served)
    return any(each is first for each in last.path())
