"""Quotas and times to live: how much a namespace keeps, and for how long.

A namespace with a limit has queues of its own beside those of all: what it keeps beyond its quota, or
beyond its time in agreed time (rule R14), leaves as soon as nothing holds it, the least recently
used first, whatever the eviction policy says of others.

What has to be saved before it leaves stays on its tier for a while, held by the copy. It is *leaving*,
and counts as gone, so that nothing else leaves in its place: until nothing holds it, however the copy
has ended, or until somebody uses or pins it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ...protocol.config import ANY_NAMESPACE, NamespaceLimit
from ...protocol.eviction_policies import LEAST_RECENT
from .eviction import EvictionQueue
from .node import Node

Evictable = Callable[[int, Node], bool]
"""Says whether a node's full attention may leave a tier."""


class _Limited:
    """The nodes that one namespace with a limit keeps."""

    def __init__(self, limit: NamespaceLimit, evictable: Evictable) -> None:
        self.quotas = (limit.device_pages, limit.host_pages)
        self.ttl_ms = None if limit.ttl_s is None else int(limit.ttl_s * 1000)
        self.pages = [0, 0]
        self.leaving: tuple[set[Node], set[Node]] = (set(), set())
        """By tier: the nodes that are being saved in order to leave."""
        self._leaving_pages = [0, 0]
        self.queues = tuple(
            EvictionQueue[Node](LEAST_RECENT, partial(evictable, tier)) for tier in (0, 1)
        )

    def is_over(self, tier: int) -> bool:
        """Say whether more is kept than the quota of a tier."""
        return self.surplus(tier) > 0

    def surplus(self, tier: int) -> int:
        """Return by how many pages more than the quota of a tier is kept, and not leaving."""
        quota = self.quotas[tier]
        return 0 if quota is None else self.pages[tier] - self._leaving_pages[tier] - quota

    def leave(self, node: Node, tier: int) -> None:
        """Count a node as leaving."""
        self.leaving[tier].add(node)
        self._leaving_pages[tier] += node.width

    def stay(self, node: Node, tier: int) -> bool:
        """Count a node as leaving no more; say whether it was."""
        if node not in self.leaving[tier]:
            return False
        self.leaving[tier].remove(node)
        self._leaving_pages[tier] -= node.width
        return True


def _expired(queue: EvictionQueue[Node], ttl_ms: int, now_ms: int) -> Iterator[Node]:
    """Yield the nodes that were not used for their time, and have left when the next is asked for."""
    while (node := queue.next_victim()) is not None:
        # What was used before any time was agreed on begins to age now.
        node.used_ms = node.used_ms or now_ms
        if now_ms - node.used_ms <= ttl_ms:
            queue.try_enter(node)
            return
        yield node


class Limits:
    """The namespaces that have limits, and what of them is due to leave."""

    def __init__(self, limits: Sequence[NamespaceLimit], evictable: Evictable) -> None:
        self._evictable = evictable
        self._limits = {limit.namespace: limit for limit in limits}
        self._known: dict[str, _Limited] = {}
        self._over: tuple[dict[str, None], dict[str, None]] = ({}, {})
        """By tier: the namespaces that may keep more than their quota."""
        ttls = [int(limit.ttl_s * 1000) for limit in limits if limit.ttl_s is not None]
        self._ttl_ms = min(ttls, default=0)
        self._look_ms = [0, 0]
        """By tier: the agreed time at which times to live are looked at next."""
        self.are_set = bool(limits)
        """Whether any namespace has limits."""

    def changed(self, limit: NamespaceLimit, nodes: Iterable[Node]) -> "Limits":
        """Return the limits with another one for a namespace; one that bounds nothing is none.

        `nodes` are all of the tree, which are counted anew. What was leaving still is, unless its
        namespace has no limit any more.
        """
        limits = {**self._limits, limit.namespace: limit}
        if not limit.bounds_something:
            del limits[limit.namespace]
        changed = Limits(list(limits.values()), self._evictable)
        if not changed.are_set:
            return changed
        for node in nodes:
            for tier, (run, *_) in enumerate(node.values):
                if run is not None:
                    changed.count(node, tier, len(run))
                    changed.try_enter(node, tier)
                    before = self._of(node)
                    if before and node in before.leaving[tier] and changed.has(node):
                        changed.leave(node, tier)
        return changed

    @property
    def given(self) -> list[NamespaceLimit]:
        """The limits that are set, whether their namespaces keep something or not."""
        return list(self._limits.values())

    def has(self, node: Node) -> bool:
        """Say whether a node's namespace has a limit and keeps something."""
        return self._of(node) is not None

    @property
    def namespaces(self) -> set[str]:
        """The namespaces that have a limit and keep something."""
        return set(self._known)

    def leaving(self, tier: int) -> list[Node]:
        """Return what is being saved in order to leave a tier, in no particular order."""
        return [node for limited in self._known.values() for node in limited.leaving[tier]]

    def count(self, node: Node, tier: int, pages: int) -> None:
        """Note that full-attention pages of a node came to a tier, or left it."""
        limited = self._of(node) if pages < 0 else self._made_for(node)
        if limited is not None:
            limited.pages[tier] += pages
            if pages < 0:
                limited.queues[tier].discard(node)
            self._stay(limited, node, tier)
            if not any(limited.pages):
                # Salts may be as many as requests.
                del self._known[node.place.namespace]

    def try_enter(self, node: Node, tier: int) -> None:
        """Enter a node, if it may be evicted."""
        limited = self._of(node)
        if limited is not None and self._evictable(tier, node):
            limited.queues[tier].try_enter(node)
            # One that was cut before it was saved may have a part that nothing was begun for.
            self._stay(limited, node, tier)

    def used(self, node: Node) -> bool:
        """Note that a node was used; say whether it was leaving."""
        limited = self._of(node)
        if limited is None:
            return False
        was_leaving = False
        for tier, queue in enumerate(limited.queues):
            queue.used(node)
            was_leaving |= self._stay(limited, node, tier)
        return was_leaving

    def leave(self, node: Node, tier: int) -> None:
        """Note that a node is about to be saved, so that it can leave for its namespace's quota."""
        limited = self._of(node)
        assert limited is not None
        limited.leave(node, tier)

    def stay(self, node: Node, tier: int) -> bool:
        """Note that a node does not leave for now; say whether it was leaving."""
        limited = self._of(node)
        return limited is not None and self._stay(limited, node, tier)

    def was_split(self, upper: Node) -> None:
        """Take note of the upper half of a node that was cut: both halves leave, if it was to."""
        limited = self._of(upper)
        (lower,) = upper.children.values()
        for leaving in () if limited is None else limited.leaving:
            if lower in leaving:
                leaving.add(upper)

    def divide(self, upper: Node, lower: Node) -> bool:
        """Say whether only one of two nodes is to leave."""
        limited = self._of(upper)
        return limited is not None and any(
            (upper in leaving) is not (lower in leaving) for leaving in limited.leaving
        )

    def discard(self, upper: Node, tier: int) -> None:
        """Drop a node that is to be one with its only child, which counts for both."""
        limited = self._of(upper)
        if limited is not None:
            limited.queues[tier].discard(upper)
            limited.leaving[tier].discard(upper)

    def over_quota(self, tier: int) -> tuple[Node, int] | None:
        """Remove and return a node of a namespace that keeps more than its quota, if any can go.

        It comes with the number of pages that the namespace keeps beyond the quota.
        """
        for name in list(self._over[tier]):
            limited = self._known.get(name)
            victim = None
            if limited is not None and limited.is_over(tier):
                victim = limited.queues[tier].next_victim()
            if limited is not None and victim is not None:
                return victim, limited.surplus(tier)
            # It is looked at again once something comes or is let go.
            del self._over[tier][name]
        return None

    def expired(self, tier: int, now_ms: int) -> Iterator[Node]:
        """Yield the nodes whose time on a tier is over; each must leave before the next is asked for.

        Every namespace is looked at, so that is done no more often than a sixteenth of the shortest
        time, which is how late a node may leave.
        """
        if not self._ttl_ms or now_ms < self._look_ms[tier]:
            return
        self._look_ms[tier] = now_ms + self._ttl_ms // 16
        for limited in list(self._known.values()):
            if limited.ttl_ms is not None:
                yield from _expired(limited.queues[tier], limited.ttl_ms, now_ms)

    def _stay(self, limited: _Limited, node: Node, tier: int) -> bool:
        was_leaving = limited.stay(node, tier)
        if limited.is_over(tier):
            self._over[tier][node.place.namespace] = None
        return was_leaving

    def _of(self, node: Node) -> _Limited | None:
        """Return the counts of a node's namespace; None where it has no limit, or keeps nothing."""
        return self._known.get(node.place.namespace)

    def _made_for(self, node: Node) -> _Limited | None:
        """Return the counts of the namespace of a node that gets pages; None where it has no limit."""
        namespace = node.place.namespace
        known = self._known.get(namespace)
        if known is None:
            limit = self._limits.get(namespace) or self._limits.get(ANY_NAMESPACE)
            if limit is None:
                return None
            known = self._known[namespace] = _Limited(limit, self._evictable)
        return known
