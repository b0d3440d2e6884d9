"""Damage to the objects of `3fs://`: the bytes in an object's slot change, and its index does not.

So what finds the damage is the check that every read makes. If the slot is given to another object in
this very moment, that one may be spoilt in its place; it is found then as well.

All slots have one length, so an object cannot end early in its slot. Where its end is to be missing,
other bytes lie there, as they do after a transfer into a used slot that broke off.
"""

from functools import partial
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import ObjectName, name_digest
from ..page_index.contract import Entry
from ..thread_calls import Stop
from ..three_fs.backend import ThreeFsBackend
from ..three_fs.slots import OpenSlots
from ..three_fs.transfers import Extent, Moved
from .damage import Damage

_OTHER_BYTES: Final = bytes(255 - each for each in range(256))
"""For each byte one that it is not."""


async def damage_object(backend: ThreeFsBackend, damage: Damage, deadline: float) -> bool:
    """Damage a stored object; see `stores.Damager`."""
    if backend.read_only:
        return False
    work = partial(_damage, backend, damage)
    return await backend.on_thread(work, late=False, deadline=deadline)


def _damage(backend: ThreeFsBackend, damage: Damage, stop: Stop) -> bool:
    slots = backend.slots
    entry = _look_up(slots, damage.name, stop)
    raw = entry and _content(slots, entry, stop)
    if entry is None or raw is None:
        return False
    there = None if damage.other is None else _look_up(slots, damage.other, stop)
    damaged = damage.apply(raw, there and _content(slots, there, stop))
    if damaged is None:
        return False
    damaged += raw[len(damaged) :].translate(_OTHER_BYTES)
    if not _move(slots, entry, memoryview(damaged), stop, reads=False):
        return False
    now = _look_up(slots, damage.name, stop)
    return now is not None and now.generation == entry.generation


def _look_up(slots: OpenSlots, name: ObjectName, stop: Stop) -> Entry | None:
    digest = name_digest(name)
    if digest is None:
        return None
    try:
        (entry,) = slots.index.look_up([digest], stop)
    except StorageError:
        return None
    fits = entry and HEADER_BYTES + entry.length <= slots.settings.slot_bytes
    return entry if fits else None


def _content(slots: OpenSlots, entry: Entry, stop: Stop) -> bytes | None:
    """Return an object as it lies in its slot, with its header."""
    raw = bytearray(HEADER_BYTES + entry.length)
    return bytes(raw) if _move(slots, entry, memoryview(raw), stop, reads=True) else None


def _move(slots: OpenSlots, entry: Entry, content: memoryview, stop: Stop, *, reads: bool) -> bool:
    """Read or write the first bytes of a slot; say whether all went well."""
    if stop.due():
        return False
    try:
        fd = slots.files.fd(entry.place, create=False)
    except OSError:
        return False
    extent = Extent(fd, entry.offset, (content,))
    return slots.transfers.move([[extent]], stop, stop.deadline, reads=reads) == [Moved.WHOLE]
