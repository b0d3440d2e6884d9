"""Cache policies of a schedule: write policy, eviction order, namespace limits and pins."""

from dataclasses import dataclass, replace
from random import Random

from ...ranks.protocol.config import ANY_NAMESPACE, Eviction, NamespaceLimit, WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The cache policies drawn for one schedule."""

    write_policy: WritePolicy
    selective_hits: int
    eviction: Eviction
    limits: tuple[NamespaceLimit, ...]
    pinned_pages: int | None


def draw_policies(random: Random, engine_owns_device: bool) -> Policies:
    """Draw a schedule's cache policies.

    An engine that owns the device pages chooses the backups itself, so the write policy is then fixed.
    """
    policies = Policies(
        write_policy=random.choice((*[WritePolicy.WRITE_THROUGH] * 3, *WritePolicy)),
        selective_hits=random.randint(1, 3),
        eviction=random.choice((Eviction.LRU, *Eviction)),
        limits=draw_limits(random) if random.random() < 0.25 else (),
        pinned_pages=random.choice((None, 4, 20)),
    )
    if not engine_owns_device:
        return policies
    limits = tuple(replace(each, device_pages=None) for each in policies.limits)
    return replace(policies, write_policy=WritePolicy.WRITE_THROUGH, limits=limits)


def draw_limits(random: Random) -> tuple[NamespaceLimit, ...]:
    """Draw limits for one or several namespaces; some of the limits are None (unbounded)."""
    return tuple(
        NamespaceLimit(
            namespace=namespace,
            device_pages=random.choice((None, 0, 5, 20)),
            host_pages=random.choice((None, 0, 5, 20)),
            ttl_s=random.choice((None, 0.2, 2.0)),
        )
        for namespace in random.choice(((ANY_NAMESPACE,), ("tenant",), ("tenant", ANY_NAMESPACE)))
    )
