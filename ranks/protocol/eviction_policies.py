"""Eviction policies: the order in which nodes are evicted, beyond recency.

A policy gives each node a grade. Nodes of the smallest grade are evicted first, the least recently used
first within a grade. Policies are found by name; other packages add theirs with
`register_eviction_policy`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...errors import ConfigError

HITS_GRADED_MAX = 64
"""Hits above this number do not raise a node's grade, so formerly hot nodes can be evicted
eventually."""


class Graded(Protocol):
    """The fields of a tree node that policies and eviction queues read. Nodes hash by identity."""

    id: int
    last_access: int
    """The logical clock at the node's last use; never decreases."""
    hits: int
    """How often the node was used again after its creation."""
    priority: int
    """The highest priority of a request that used the node."""


class EvictionPolicy(Protocol):
    """An eviction order, registered under the same name on every rank.

    A grade must depend on the node alone, so that all ranks evict the same nodes. Within a grade the
    least recently used node is evicted first.
    """

    @property
    def name(self) -> str:
        """The name by which settings select the policy."""
        ...

    def grade(self, node: Graded) -> int:
        """Return the node's grade; the smallest is evicted first. Grades should be few."""
        ...


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """An eviction policy that this package provides."""

    name: str
    graded: Callable[[Graded], int]

    def grade(self, node: Graded) -> int:
        """See `EvictionPolicy`."""
        return self.graded(node)


LEAST_RECENT = _BuiltIn("lru", lambda _: 0)
"""Evict the least recently used node first."""

_POLICIES: dict[str, EvictionPolicy] = {
    each.name: each
    for each in (
        LEAST_RECENT,
        # Fewest hits first.
        _BuiltIn("lfu", lambda node: min(node.hits, HITS_GRADED_MAX)),
        # Segmented LRU: nodes used once go before nodes that were hit again, so one long scan of new
        # prompts cannot evict prefixes that several requests share.
        _BuiltIn("slru", lambda node: 1 if node.hits else 0),
        # Nodes used only by requests of low priority go first.
        _BuiltIn("priority", lambda node: node.priority),
    )
}


def register_eviction_policy(policy: EvictionPolicy) -> None:
    """Register a policy under its name. Call on every rank, before a cache that uses it opens."""
    if policy.name in _POLICIES:
        raise ConfigError(
            f"eviction policy {policy.name!r} is already registered; choose another name"
        )
    _POLICIES[policy.name] = policy


def known_policies() -> list[str]:
    """Return the sorted names of all registered policies."""
    return sorted(_POLICIES)


def find_policy(name: str) -> EvictionPolicy:
    """Return the policy called `name`, or raise `ConfigError` that lists the known ones."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(known_policies())}")
    return _POLICIES[name]
