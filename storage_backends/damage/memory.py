"""Damage to the objects of `memory://`: other bytes stand in an object's place in the dictionary."""

from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import name_digest
from ..memory import MemoryBackend
from .damage import Damage


async def damage_object(backend: MemoryBackend, damage: Damage, deadline: float) -> bool:
    """Damage a stored object; see `stores.Damager`."""
    digest, objects = name_digest(damage.name), backend.shelf.objects
    found = None if digest is None else objects.get(digest)
    if digest is None or found is None or backend.clock() >= deadline:
        return False
    other = None if damage.other is None else objects.get(name_digest(damage.other) or b"")
    raw = damage.apply(b"".join(found), None if other is None else b"".join(other))
    if raw is None:
        return False
    with backend.shelf.lock:
        if objects.get(digest) is found:
            objects[digest] = (raw[:HEADER_BYTES], raw[HEADER_BYTES:])
            return True
    return False
