"""Damage to objects in a Mooncake Store, done on purpose: what `mooncake://` does for `fault+`.

The client puts the damaged bytes in the place of the object, also while somebody reads it: so there
is no moment in which the name is free and another writer could come first (but for what is on a disk
only, which is removed before). Damaged is what a reader would be given, the object's last generation.
"""

from ...page_format.object_name import ObjectName, name_digest
from ..mooncake.client import MooncakeClient
from ..mooncake.names import key_of
from ..mooncake.pieces import Code
from ..mooncake.reads import ObjectReader
from ..thread_calls import Stop
from .damage import Damage


def damage_object(client: MooncakeClient, reader: ObjectReader, damage: Damage, stop: Stop) -> bool:
    """Damage a stored object; see `damage.Damageable`. Blocks.

    The store keeps no object without any byte, so of one that is to lose all of them one stays.
    """
    key, raw = _content(client, reader, damage.name, stop)
    if not raw:
        return False
    other = None if damage.other is None else _content(client, reader, damage.other, stop)[1]
    damaged = damage.apply(raw, other or None)
    if damaged is None or stop.due():
        return False
    code = client.overwrite(key, damaged or raw[:1])
    if code == Code.NO_ROOM:
        # The store has let go of the object before it looked whether the longer one has room.
        client.overwrite(key, raw)
    return not code


def _content(
    client: MooncakeClient, reader: ObjectReader, name: ObjectName, stop: Stop
) -> tuple[str, bytes]:
    """Return an object's key, and its bytes with the header: none if they cannot be had."""
    digest = name_digest(name)
    if digest is None or stop.due():
        return "", b""
    (generation,) = reader.latest([digest])
    key = key_of(digest, generation or 0)
    whole = b"" if generation is None else client.whole(key, stop)
    return key, b"" if isinstance(whole, int) else bytes(whole)
