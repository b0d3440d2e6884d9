"""Damage to the objects of `mooncake://`: other bytes are put in an object's place in the store.

The client does that also while somebody reads the object: so there is no moment in which the name is
free and another writer could come first (but for what is on a disk only, which is removed before).
Damaged is what a reader would be given, the object's last generation.
"""

from functools import partial

from ...page_format.object_name import ObjectName, name_digest
from ..mooncake.backend import MooncakeBackend
from ..mooncake.names import key_of
from ..mooncake.pieces import Code
from ..mooncake.reads import ObjectReader
from ..thread_calls import Stop
from .damage import Damage


async def damage_object(backend: MooncakeBackend, damage: Damage, deadline: float) -> bool:
    """Damage a stored object; see `stores.Damager`."""
    work = partial(_damage, backend, damage)
    return await backend.on_thread(work, late=False, deadline=deadline)


def _damage(backend: MooncakeBackend, damage: Damage, stop: Stop) -> bool:
    """Damage a stored object. Blocks.

    The store keeps no object without any byte, so of one that is to lose all of them one stays.
    """
    reader = backend.reader
    key, raw = _content(reader, damage.name, stop)
    if not raw:
        return False
    other = None if damage.other is None else _content(reader, damage.other, stop)[1]
    damaged = damage.apply(raw, other or None)
    if damaged is None or stop.due():
        return False
    code = reader.client.overwrite(key, damaged or raw[:1])
    if code == Code.NO_ROOM:
        # The store has let go of the object before it looked whether the longer one has room.
        reader.client.overwrite(key, raw)
    return not code


def _content(reader: ObjectReader, name: ObjectName, stop: Stop) -> tuple[str, bytes]:
    """Return an object's key, and its bytes with the header: none if they cannot be had."""
    digest = name_digest(name)
    if digest is None or stop.due():
        return "", b""
    (generation,) = reader.latest([digest])
    key = key_of(digest, generation or 0)
    whole = b"" if generation is None else reader.client.whole(key, stop)
    return key, b"" if isinstance(whole, int) else bytes(whole)
