"""Eviction policies: what makes one node leave before another, beyond how recently it was used.

A policy gives a node a grade. The nodes of the smallest grade leave first, and within a grade the one
that was used longest ago. Policies are found by name, and another package adds one with
`register_eviction_policy`.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A policy of this package."""

    name: str
    graded: Callable[[Graded], int]

    def grade(self, node: Graded) -> int:
        """See `EvictionPolicy`."""
        return self.graded(node)


LEAST_RECENT = _BuiltIn("lru", lambda _: 0)
"""What was used longest ago leaves first."""

_POLICIES: dict[str, EvictionPolicy] = {
    each.name: each
    for each in (
        LEAST_RECENT,
        # What was hit least often leaves first.
        _BuiltIn("lfu", lambda node: min(node.hits, HITS_GRADED_MAX)),
        # What was used once leaves before anything that was hit again (segmented LRU), so that one long
        # scan of new prompts cannot drive out what several requests share.
        _BuiltIn("slru", lambda node: 1 if node.hits else 0),
        # What only requests of low priority used leaves first.
        _BuiltIn("priority", lambda node: node.priority),
    )
}


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
