"""Quotas and times to live of namespaces.

A namespace with a limit has additional eviction queues. Pages beyond its quota or time to live (agreed
time, rule R14) are evicted as soon as they have no lock or pin, least recently used first, under any
eviction policy.

Under write-back, a node may have to be saved (backed up) before it is evicted. While it is saved, the
node is *leaving*: the copy holds it on its tier, but its pages count as evicted, so that nothing else
is evicted instead. A node is leaving until its last lock is released, or until it is used or pinned.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ...protocol.config import ANY_NAMESPACE, NamespaceLimit
from ...protocol.eviction_policies import LEAST_RECENT
from .eviction import EvictionQueue
from .node import Node

Evictable = Callable[[int, Node], bool]
"""Returns whether a node's full-attention pages may be evicted from a tier."""


class _Limited:
    """Page counts and eviction queues of one namespace with a limit."""

    def __init__(self, limit: NamespaceLimit, evictable: Evictable) -> None:
        self.quotas = (limit.device_pages, limit.host_pages)
        self.ttl_ms = None if limit.ttl_s is None else int(limit.ttl_s * 1000)
        self.pages = [0, 0]
        self.leaving: tuple[set[Node], set[Node]] = (set(), set())
        """By tier: the nodes that are being saved so that they can be evicted."""
        self._leaving_pages = [0, 0]
        self.queues = tuple(
            EvictionQueue[Node](LEAST_RECENT, partial(evictable, tier)) for tier in (0, 1)
        )

    def is_over(self, tier: int) -> bool:
        """Return whether the namespace exceeds its quota on a tier."""
        return self.surplus(tier) > 0

    def surplus(self, tier: int) -> int:
        """Return how many pages exceed the quota on a tier; pages being saved do not count."""
        quota = self.quotas[tier]
        return 0 if quota is None else self.pages[tier] - self._leaving_pages[tier] - quota

    def leave(self, node: Node, tier: int) -> None:
        """Count a node as leaving: it is being saved (backed up) before its eviction."""
        self.leaving[tier].add(node)
        self._leaving_pages[tier] += node.width

    def stay(self, node: Node, tier: int) -> bool:
        """Stop counting a node as leaving (being saved before its eviction); return whether it was."""
        if node not in self.leaving[tier]:
            return False
        self.leaving[tier].remove(node)
        self._leaving_pages[tier] -= node.width
        return True


def _expired(queue: EvictionQueue[Node], ttl_ms: int, now_ms: int) -> Iterator[Node]:
    """Yield the nodes last used over `ttl_ms` ago; the caller evicts each before it takes the next."""
    while (node := queue.next_victim()) is not None:
        # Start the time to live now if the node was last used before the ranks agreed on a time.
        node.used_ms = node.used_ms or now_ms
        if now_ms - node.used_ms <= ttl_ms:
            queue.try_enter(node)
            return
        yield node


class Limits:
    """The namespaces that have limits, with their page counts and eviction queues."""

    def __init__(self, limits: Sequence[NamespaceLimit], evictable: Evictable) -> None:
        self._evictable = evictable
        self._limits = {limit.namespace: limit for limit in limits}
        self._known: dict[str, _Limited] = {}
        self._over: tuple[dict[str, None], dict[str, None]] = ({}, {})
        """By tier: the namespaces that may exceed their quota."""
        ttls = [int(limit.ttl_s * 1000) for limit in limits if limit.ttl_s is not None]
        self._ttl_ms = min(ttls, default=0)
        self._look_ms = [0, 0]
        """By tier: the agreed time of the next check of times to live."""
        self.are_set = bool(limits)

    def changed(self, limit: NamespaceLimit, nodes: Iterable[Node]) -> "Limits":
        """Return a copy of these limits with `limit` in place of the old limit of its namespace.

        If `limit` bounds nothing, the copy has no limit for the namespace. `nodes` are all nodes of the
        tree, whose pages are counted anew. A node that is being saved before eviction stays marked if
        its namespace still has a limit.
        """
        limits = {**self._limits, limit.namespace: limit}
        if not limit.limits_anything:
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
        """The limits that are set, including those of namespaces without pages."""
        return list(self._limits.values())

    def has(self, node: Node) -> bool:
        """Return whether a node's namespace has a limit and has pages."""
        return self._of(node) is not None

    @property
    def namespaces(self) -> set[str]:
        """The namespaces that have a limit and have pages."""
        return set(self._known)

    def leaving(self, tier: int) -> list[Node]:
        """Return the nodes on a tier that are being saved before eviction, in no particular order."""
        return [node for limited in self._known.values() for node in limited.leaving[tier]]

    def count(self, node: Node, tier: int, pages: int) -> None:
        """Add full-attention pages of a node to its namespace's count on a tier.

        `pages` is negative when the pages leave the tier.
        """
        limited = self._of(node) if pages < 0 else self._made_for(node)
        if limited is not None:
            limited.pages[tier] += pages
            if pages < 0:
                limited.queues[tier].discard(node)
            self._stay(limited, node, tier)
            if not any(limited.pages):
                # Each request may use its own salt, so drop empty entries to bound the dict.
                del self._known[node.place.namespace]

    def try_enter(self, node: Node, tier: int) -> None:
        """Enter a node into its namespace's eviction queue, if it may be evicted."""
        limited = self._of(node)
        if limited is not None and self._evictable(tier, node):
            limited.queues[tier].try_enter(node)
            # No copy holds a node that may be evicted, so stop counting it as leaving. For example, a
            # node was split before its backup began, and the backup covers only the other half.
            self._stay(limited, node, tier)

    def used(self, node: Node) -> bool:
        """Update the queues after a node's use; return whether it was being saved before eviction."""
        limited = self._of(node)
        if limited is None:
            return False
        was_leaving = False
        for tier, queue in enumerate(limited.queues):
            queue.used(node)
            was_leaving |= self._stay(limited, node, tier)
        return was_leaving

    def leave(self, node: Node, tier: int) -> None:
        """Count a node as leaving: it is backed up, then evicted, because of the namespace's quota."""
        limited = self._of(node)
        assert limited is not None
        limited.leave(node, tier)

    def stay(self, node: Node, tier: int) -> bool:
        """Stop counting a node as leaving a tier (see the module); return whether it was leaving."""
        limited = self._of(node)
        return limited is not None and self._stay(limited, node, tier)

    def was_split(self, upper: Node) -> None:
        """Count the upper half of a split node as leaving a tier if the lower half is leaving it."""
        limited = self._of(upper)
        (lower,) = upper.children.values()
        for leaving in () if limited is None else limited.leaving:
            if lower in leaving:
                leaving.add(upper)

    def divide(self, upper: Node, lower: Node) -> bool:
        """Return whether two nodes must be kept separate, because exactly one of them is leaving."""
        limited = self._of(upper)
        return limited is not None and any(
            (upper in leaving) is not (lower in leaving) for leaving in limited.leaving
        )

    def discard(self, upper: Node, tier: int) -> None:
        """Remove `upper`, which is being merged into its only child; the child then represents both."""
        limited = self._of(upper)
        if limited is not None:
            limited.queues[tier].discard(upper)
            limited.leaving[tier].discard(upper)

    def over_quota(self, tier: int) -> tuple[Node, int] | None:
        """Remove and return (node, surplus): a node to evict from a namespace over quota; or None.

        `surplus` is the number of pages by which the namespace exceeds the quota.
        """
        for name in list(self._over[tier]):
            limited = self._known.get(name)
            victim = None
            if limited is not None and limited.is_over(tier):
                victim = limited.queues[tier].next_victim()
            if limited is not None and victim is not None:
                return victim, limited.surplus(tier)
            # Skip this namespace until pages of it are added or released.
            del self._over[tier][name]
        return None

    def expired(self, tier: int, now_ms: int) -> Iterator[Node]:
        """Yield nodes whose time to live on a tier is over; each must be evicted before the next.

        The check visits every namespace, so it runs at most once per sixteenth of the shortest time to
        live. An eviction may be late by one such interval.
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
        return self._known.get(node.place.namespace)

    def _made_for(self, node: Node) -> _Limited | None:
        namespace = node.place.namespace
        known = self._known.get(namespace)
        if known is None:
            limit = self._limits.get(namespace) or self._limits.get(ANY_NAMESPACE)
            if limit is None:
                return None
            known = self._known[namespace] = _Limited(limit, self._evictable)
        return known
