"""Eviction policies: the order in which tree nodes are evicted.

A policy gives each node a grade. Nodes of the smallest grade are evicted first. Among nodes of one
grade, the least recently used node is evicted first. Policies are found by name; other packages add
theirs with `register_eviction_policy`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...errors import ConfigError

HITS_GRADED_MAX = 64
"""Maximum number of hits that the LFU policy counts for a node, so that a formerly hot node can be
evicted."""


class Graded(Protocol):
    """The fields of a tree node that eviction policies and eviction queues may read.

    Nodes hash by identity.
    """

    id: int
    last_access: int
    """The logical clock at the node's last use; never decreases."""
    hits: int
    """Number of uses of the node after its creation."""
    priority: int
    """The highest priority of a request that used the node."""


class EvictionPolicy(Protocol):
    """Interface of an eviction policy, registered under the same name on every rank.

    A grade must depend on the node alone, so that all ranks evict the same nodes. Nodes of the smallest
    grade are evicted first. Among nodes of one grade, the least recently used node is evicted first.
    """

    @property
    def name(self) -> str:
        """The name by which settings select the policy."""
        ...

    def grade(self, node: Graded) -> int:
        """Return the node's grade; smaller grades are evicted first. Use few distinct grades."""
        ...


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """An eviction policy of this package, made from a name and a function that grades a node."""

    name: str
    graded: Callable[[Graded], int]

    def grade(self, node: Graded) -> int:
        """Return the node's grade; see `EvictionPolicy.grade`."""
        return self.graded(node)


LEAST_RECENT = _BuiltIn("lru", lambda _: 0)
"""Evict the least recently used node first."""

_POLICIES: dict[str, EvictionPolicy] = {
    each.name: each
    for each in (
        LEAST_RECENT,
        # LFU: evict the nodes with the fewest hits first.
        _BuiltIn("lfu", lambda node: min(node.hits, HITS_GRADED_MAX)),
        # Segmented LRU: evict nodes without a hit before nodes that were hit at least once. So one long
        # scan of new prompts cannot evict prefixes that several requests share.
        _BuiltIn("slru", lambda node: 1 if node.hits else 0),
        # Priority: a node has the highest priority of the requests that used it. Evict nodes of the
        # lowest priority first.
        _BuiltIn("priority", lambda node: node.priority),
    )
}


def register_eviction_policy(policy: EvictionPolicy) -> None:
    """Register a policy under its name. Call on every rank before opening a cache that uses it."""
    if policy.name in _POLICIES:
        raise ConfigError(
            f"eviction policy {policy.name!r} is already registered; choose another name"
        )
    _POLICIES[policy.name] = policy


def known_policies() -> list[str]:
    """Return the sorted names of all registered policies."""
    return sorted(_POLICIES)


def find_policy(name: str) -> EvictionPolicy:
    """Return the policy called `name`, or raise `ConfigError` that lists the registered policies."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(known_policies())}")
    return _POLICIES[name]
