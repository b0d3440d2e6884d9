"""Damage to objects in slots, done on purpose: the blocking part of what `3fs://` does for `fault+`.

The bytes in the slot change and the index stays as it is, so that what finds the damage is the check
that every read makes. If the slot is given to another object in this very moment, that one may be
spoilt in its place; it is found then as well.

All slots have one length, so an object cannot end early in its slot. Where its end is to be missing,
other bytes lie there, as they do after a transfer into a used slot that broke off.
"""

from collections.abc import Sequence
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import ObjectName, name_digest
from ..page_index.contract import Entry, Settings
from ..thread_calls import Stop
from ..three_fs.files import SlotFiles
from ..three_fs.index import IndexCalls
from ..three_fs.transfers import Extent, Moved, Transfers
from .damage import Damage

_OTHER_BYTES: Final = bytes(255 - each for each in range(256))
"""For each byte one that it is not."""


class SlotDamage:
    """Damages the objects of one store. Methods may block."""

    def __init__(
        self, files: SlotFiles, index: IndexCalls, transfers: Transfers, settings: Settings
    ) -> None:
        self._files = files
        self._index = index
        self._transfers = transfers
        self._settings = settings

    def damage(self, damages: Sequence[Damage], stop: Stop) -> list[bool]:
        """Damage stored objects; see `damage.Damageable`."""
        return [self._damage(each, stop) for each in damages]

    def _damage(self, damage: Damage, stop: Stop) -> bool:
        entry = self._look_up(damage.name, stop)
        raw = entry and self._content(entry, stop)
        if entry is None or raw is None:
            return False
        there = None if damage.other is None else self._look_up(damage.other, stop)
        damaged = damage.apply(raw, there and self._content(there, stop))
        if damaged is None:
            return False
        damaged += raw[len(damaged) :].translate(_OTHER_BYTES)
        if not self._move(entry, memoryview(damaged), stop, reads=False):
            return False
        now = self._look_up(damage.name, stop)
        return now is not None and now.generation == entry.generation

    def _look_up(self, name: ObjectName, stop: Stop) -> Entry | None:
        digest = name_digest(name)
        if digest is None:
            return None
        try:
            (entry,) = self._index.look_up([digest], stop)
        except StorageError:
            return None
        fits = entry and HEADER_BYTES + entry.length <= self._settings.slot_bytes
        return entry if fits else None

    def _content(self, entry: Entry, stop: Stop) -> bytes | None:
        """Return an object as it lies in its slot, with its header."""
        raw = bytearray(HEADER_BYTES + entry.length)
        return bytes(raw) if self._move(entry, memoryview(raw), stop, reads=True) else None

    def _move(self, entry: Entry, content: memoryview, stop: Stop, *, reads: bool) -> bool:
        """Read or write the first bytes of a slot; say whether all went well."""
        if stop.due():
            return False
        try:
            fd = self._files.fd(entry.place, create=False)
        except OSError:
            return False
        extent = Extent(fd, entry.offset, (content,))
        return self._transfers.move([[extent]], stop, stop.deadline, reads=reads) == [Moved.WHOLE]
