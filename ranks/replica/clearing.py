"""Explicit removal of cached pages: cache reset, dropped namespaces and lowered limits.

Pages that a request or operation holds are freed only when the request or operation releases them.
"""

from collections.abc import Iterable, Sequence

from ..protocol.answers import Dropped
from ..protocol.config import NamespaceLimit
from ..protocol.events import Cause, Reset
from .core.replica_parts import ReplicaParts
from .operations.requests import Requests
from .operations.store import Store
from .pinning import Pinning
from .prefetch.prefetching import Prefetching
from .tree.node import Node
from .tree.page_allocator import TIERS
from .tree.prefixes import Prefixes


class Clearing:
    """Resets the cache, evicts the unused pages of namespaces, and sets their limits."""

    def __init__(  # noqa: PLR0917 - the parts that it touches.
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        requests: Requests,
        prefetching: Prefetching,
        pinning: Pinning,
        store: Store,
    ) -> None:
        self._journal, self._outbox = basis.journal, basis.outbox
        self._prefixes = prefixes
        self._requests = requests
        self._prefetching = prefetching
        self._pinning = pinning
        self._store = store

    def reset(self, weights_version: str | None) -> None:
        """Reset the cache: hide all cached pages from every request that is not admitted yet.

        Stops the prefetches of those requests, removes all named pins, and evicts all pages without
        lock or pin.
        """
        requests = self._requests
        for request in requests:
            if not request.admitted:
                self._prefetching.stop(request)
        self._pinning.drop_all()
        self._store.forget_all_misses()
        requests.reset(weights_version)
        self._outbox.events.append(Reset(requests.generation, weights_version))
        self._evict(self._nodes(self._prefixes.tree.roots.values()), Cause.RESET)

    def drop(self, namespace: str | None) -> Dropped:
        """Remove the named pins of a namespace and evict the namespace's unused pages.

        If `namespace` is None, do so for all namespaces.
        """
        self._journal.record("drop", namespace)
        for pin in list(self._pinning.pins.values()):
            if namespace in {None, pin.node.place.namespace}:
                self._pinning.unpin(pin.name)
        roots = self._prefixes.tree.roots.values()
        nodes = self._nodes(each for each in roots if namespace in {None, each.place.namespace})
        before = _pages_of(nodes)
        self._evict(nodes, Cause.DROPPED)
        held = _pages_of(nodes)
        return Dropped(before - held, held)

    def limit(self, limit: NamespaceLimit) -> None:
        """Set a namespace's limit; the next verdict evicts the pages that exceed the limit."""
        self._journal.record(
            "limit", limit.namespace, limit.device_pages, limit.host_pages, limit.ttl_s
        )
        self._prefixes.allocator.limit(limit)

    def _nodes(self, roots: Iterable[Node]) -> list[Node]:
        """Return all nodes below `roots` in eviction order: children before parents."""
        return list(self._prefixes.tree.nodes(roots))[::-1]

    def _evict(self, nodes: Sequence[Node], cause: Cause) -> None:
        for tier in TIERS:
            self._prefixes.allocator.evict_all(tier, nodes, cause)


def _pages_of(nodes: Iterable[Node]) -> int:
    return sum(len(run) for node in nodes for (run, *_) in node.values if run is not None)
