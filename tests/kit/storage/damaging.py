"""Damage to stored objects, done on purpose as `fault+` does it, in one line of a test."""

from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.damage.damage import Damage, DamageKind
from lockstep.storage_backends.damage.stores import damager_of
from tests.kit.storage.calls import object_name, soon


async def damaged(
    backend: StorageBackend,
    kind: DamageKind,
    number: int = 1,
    *,
    seed: int = 7,
    other: int | None = 2,
    deadline: float | None = None,
) -> bool:
    """Damage the object of this number, by another's bytes if it is to be WRONG; say if it was done."""
    damager = damager_of(backend)
    assert damager is not None
    others = None if other is None else object_name(other)
    damage = Damage(name=object_name(number), kind=kind, seed=seed, other=others)
    return await damager(damage, soon() if deadline is None else deadline)
