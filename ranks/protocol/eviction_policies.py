"""Eviction policies: what makes one node leave before another, beyond how recently it was used.

A policy gives a node a grade. The nodes of the smallest grade leave first, and within a grade the one
that was used longest ago. Policies are found by name, and another package adds one with
`register_eviction_policy`.
"""

from typing import Protocol

from ...errors import ConfigError

HITS_GRADED_MAX = 64
"""Beyond so many hits, more of them do not keep a node longer: what was once hot leaves at last."""


class Graded(Protocol):
    """The part of a node that policies and eviction queues see. Nodes hash by identity."""

    id: int
    last_access: int
    """The logical clock when the node was last used; never decreases."""
    hits: int
    """How often the node was used again after it was made."""
    priority: int
    """The highest priority of a request that used the node."""


class EvictionPolicy(Protocol):
    """One order of eviction, to be registered by the same name on every rank.

    What it answers must follow from the node alone, so that all ranks evict the same. Within a grade
    the node leaves first that was used longest ago.
    """

    @property
    def name(self) -> str:
        """The name by which the policy is chosen."""
        ...

    def grade(self, node: Graded) -> int:
        """Return the node's grade; smaller leaves first. The number of grades should be bounded."""
        ...


class LeastRecent:
    """What was used longest ago leaves first."""

    name = "lru"

    def grade(self, node: Graded) -> int:
        del node
        return 0


class LeastFrequent:
    """What was hit least often leaves first."""

    name = "lfu"

    def grade(self, node: Graded) -> int:
        return min(node.hits, HITS_GRADED_MAX)


class Segmented:
    """What was used once leaves before anything that was hit again (segmented LRU).

    One long scan of new prompts so cannot drive out what several requests share.
    """

    name = "slru"

    def grade(self, node: Graded) -> int:
        return 1 if node.hits else 0


class ByPriority:
    """What only requests of low priority used leaves first."""

    name = "priority"

    def grade(self, node: Graded) -> int:
        return node.priority


_POLICIES: dict[str, EvictionPolicy] = {}


def register_eviction_policy(policy: EvictionPolicy) -> None:
    """Add a policy under its name, on every rank alike and before a cache is opened that uses it."""
    if policy.name in _POLICIES:
        raise ConfigError(
            f"there is an eviction policy {policy.name!r} already; choose another name"
        )
    _POLICIES[policy.name] = policy


def known_policies() -> list[str]:
    """Return the names of the policies that can be used, sorted."""
    return sorted(_POLICIES)


def find_policy(name: str) -> EvictionPolicy:
    """Return the policy, or raise `ConfigError` that lists the known ones."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(known_policies())}")
    return _POLICIES[name]


for _policy in (LeastRecent(), LeastFrequent(), Segmented(), ByPriority()):
    register_eviction_policy(_policy)
