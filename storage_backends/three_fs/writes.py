"""Blocking writes of objects into slots of `3fs://`, called from several threads.

A write reserves a slot, writes to it, and commits. Writers of one name do not wait for each other; the
first commit wins. If a write is abandoned while a ring may still write to its slot, the slot stays
reserved until its lease expires. A writer that was suspended beyond its lease may overwrite an object
that another writer has meanwhile stored in the slot. Readers detect that, so the result is a miss.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES, encode_object
from ...page_format.object_name import ObjectName, name_digest
from ...page_format.object_shape import ObjectShape
from ..base import Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..buffers import fitting
from ..records.catalogue import is_record
from ..threaded_backend import Stop
from .files import FILES_MAX, place_of
from .index_calls import LateError
from .page_index import NOTHING, Commit, CommitOutcome, Entry, PageIndex, Reservation
from .reads import OpenSlots, PlacedRead, SlotReads, may_be
from .sizes import slot_bytes_for
from .transfers import Extent, MovedObject

_WRITE_TRIES: Final = 16
_WRITTEN_AT_A_TIME: Final = 32
_PAGES_MIN: Final = 8
"""Minimum number of objects in a call for the warning about too large slots. Such a call is assumed to
write pages, because markers and manifests are written one per call."""
_WASTE: Final = 4
"""A warning is logged if a slot is at least this many times as large as the object in it."""
_UNITED_BYTES_MAX: Final = 64 << 20
"""If the copies of a try that combine columns of existing and new objects have more than this number
of bytes, the remaining objects wait for the next try."""


@dataclass(frozen=True, slots=True)
class _New:
    """An object to be written."""

    at: int
    """The object's index in the batch."""
    name: ObjectName
    digest: bytes
    buffers: Sequence[memoryview]
    shape: ObjectShape
    replaces: int = NOTHING


class SlotWrites:
    """Writes the objects of one store. Methods may block; a failure of one key never raises."""

    def __init__(
        self, slots: OpenSlots, reads: SlotReads, *, slot_count: int, lease_s: float
    ) -> None:
        self._slots = slots
        self._reads = reads
        self._slot_count = slot_count
        self._lease_s = lease_s

    def write(self, writes: Sequence[Write], stop: Stop) -> list[WriteOutcome]:
        """Write the objects that do not exist yet.

        If the existing object lacks a column of the new one, it is replaced by an object with the
        columns of both.
        """
        outcomes = [WriteOutcome.FAILED] * len(writes)
        new: list[_New] = []
        for at, write in enumerate(writes):
            digest = name_digest(write.name)
            buffers = fitting(write.buffers, write.shape.nbytes)
            if digest is not None and buffers is not None and self._fits(write.shape):
                new.append(_New(at, write.name, digest, buffers, write.shape))
        self._log_waste(new)
        for start in range(0, len(new), _WRITTEN_AT_A_TIME):
            todo = new[start : start + _WRITTEN_AT_A_TIME]
            try:
                # Up to `_WRITE_TRIES` tries may fail because of other writers. If few slots are free,
                # each try may write only one object, so allow one more try per object.
                for _ in range(_WRITE_TRIES + len(todo)):
                    if not todo:
                        break
                    if stop.due():
                        for each in todo:
                            outcomes[each.at] = WriteOutcome.TIMED_OUT
                        break
                    todo = self._write(todo, outcomes, stop)
            except LateError:
                for each in new[start:]:
                    if outcomes[each.at] is WriteOutcome.FAILED:
                        outcomes[each.at] = WriteOutcome.TIMED_OUT
                break
            except StorageError as error:
                # Stop here, because an index that failed for these objects will fail for the others
                # too.
                self._slots.complaints.say("index", "%s", error)
                break
        return outcomes

    async def note_uses(self, writes: Sequence[Write], deadline: float) -> None:
        """Mark existing objects of a `write` call as used, so that leaves are evicted before roots."""
        if not writes:
            return
        named = [name_digest(write.name) for write in writes]
        keys = [digest for digest in named if digest is not None]
        after = writes[0].after
        digest = None if after is None else name_digest(after.name)
        distance = 0 if after is None else after.distance
        # Ignore the error of an index that does not answer: the objects keep their earlier times of
        # use.
        with suppress(StorageError):
            await self._slots.index.ask(lambda index: index.use(keys, digest, distance), deadline)

    async def remove(self, names: Sequence[ObjectName], deadline: float) -> list[bool]:
        """Remove objects; return for each name whether the name is free now.

        After the deadline the result is False, but the removal may still happen.
        """

        def remove(index: PageIndex) -> list[bool]:
            digests = [name_digest(name) for name in names]
            index.remove([digest for digest in digests if digest is not None])
            return [digest is not None for digest in digests]

        try:
            return await self._slots.index.ask(remove, deadline)
        except LateError:
            return [False] * len(names)
        except StorageError as error:
            self._slots.complaints.say("index", "%s", error)
            return [False] * len(names)

    def _write(self, todo: list[_New], outcomes: list[WriteOutcome], stop: Stop) -> list[_New]:
        """Write as many objects as there are free slots; return those that need another try."""
        ready: list[_New] = []
        later: list[_New] = []
        united_bytes = 0
        standing = self._slots.index.call(
            lambda index: index.look_up([each.digest for each in todo]), stop
        )
        for new, entry in zip(todo, standing, strict=True):
            if united_bytes > _UNITED_BYTES_MAX:
                later.append(new)
                continue
            prepared = self._beside(new, entry, stop)
            if isinstance(prepared, WriteOutcome):
                outcomes[new.at] = prepared
                continue
            united_bytes += prepared.shape.nbytes if prepared.buffers is not new.buffers else 0
            ready.append(prepared)
        if not ready:
            return later
        asked_at = time.monotonic()
        lent = self._slots.index.reserve(len(ready), self._lease_s, self._slot_count, stop)
        # Ignore slots that cannot exist, which a damaged index may return. Do not release them, because
        # the index would then return them again.
        lent = [
            each for each in lent if 0 <= each.slot < FILES_MAX * self._slots.settings.file_slots
        ]
        if not lent:
            self._slots.complaints.say(
                "full",
                "no slot is free: all are being written, or hold manifests and markers, which are kept",
            )
            return later
        later += [_as_given(new, todo) for new in ready[len(lent) :]]
        sent = list(zip(ready, lent, strict=False))
        return later + self._send(sent, todo, outcomes, stop, asked_at + self._lease_s)

    def _beside(self, new: _New, entry: Entry | None, stop: Stop) -> _New | WriteOutcome:
        """Return the object to write, or the outcome if no write is needed or possible.

        `entry` is the index entry of the existing object. If that object has columns which the new one
        lacks, the object to write includes them.
        """
        if entry is None:
            return replace(new, replaces=NOTHING)
        instead = replace(new, replaces=entry.generation)
        if not may_be(entry, new.shape):
            return instead
        if not new.shape.lacks(entry.present):
            return WriteOutcome.PRESENT
        if not entry.present & ~new.shape.present:
            return instead
        theirs = new.shape.of_columns(entry.present)
        payload = memoryview(bytearray(entry.length))
        (outcome,) = self._reads.fetch(
            [PlacedRead(Read(new.name, (payload,), theirs), entry)], stop
        )
        match outcome:
            case ReadOutcome.OK:
                shape = new.shape.with_columns(entry.present)
                if not self._fits(shape):
                    return WriteOutcome.FAILED
                united = new.shape.unite(new.buffers, payload, entry.present)
                return replace(instead, buffers=(united,), shape=shape)
            case ReadOutcome.CORRUPT:
                return instead
            case ReadOutcome.TIMED_OUT:
                return WriteOutcome.TIMED_OUT
            case _:
                return WriteOutcome.FAILED

    def _send(
        self,
        sent: Sequence[tuple[_New, Reservation]],
        todo: Sequence[_New],
        outcomes: list[WriteOutcome],
        stop: Stop,
        lease_until: float,
    ) -> list[_New]:
        """Write objects into their slots and commit them; return those that need another try."""
        written: list[tuple[_New, Commit]] = []
        unused: list[Reservation] = []
        step = self._slots.transfers.objects_at_a_time
        deadline = min(stop.deadline, lease_until)
        for start in range(0, len(sent), step):
            some = sent[start : start + step]
            for (new, lent), each in zip(some, self._move(some, stop, deadline), strict=True):
                if each is MovedObject.WHOLE:
                    written.append((new, self._commit_of(new, lent)))
                    continue
                if each is MovedObject.LATE:
                    outcomes[new.at] = WriteOutcome.TIMED_OUT
                if each is not MovedObject.LATE or self._slots.transfers.lets_go:
                    unused.append(lent)
        wishes, index = [wish for _, wish in written], self._slots.index
        ends = index.call(lambda index: index.commit(wishes), stop) if wishes else []
        if unused:
            with suppress(LateError):
                index.call(lambda index: index.release(unused), stop)
        again: list[_New] = []
        for (new, _), end in zip(written, ends, strict=True):
            if end is CommitOutcome.DONE:
                outcomes[new.at] = WriteOutcome.OK
            else:
                again.append(_as_given(new, todo))
        return again

    def _move(
        self, some: Sequence[tuple[_New, Reservation]], stop: Stop, deadline: float
    ) -> list[MovedObject]:
        """Write objects into their slots; return the outcome of each."""
        moved = [MovedObject.LATE] * len(some)
        extents: list[list[Extent]] = []
        there: list[int] = []
        for at, (new, lent) in enumerate(some):
            if stop.due():
                break
            place, offset = place_of(lent.slot, self._slots.settings)
            try:
                fd = self._slots.files.fd(place, create=True)
            except OSError as error:
                self._slots.complaints.log_failure(f"{place} cannot be written", error.errno)
                moved[at] = MovedObject.FAILED
                continue
            header = memoryview(encode_object(new.name, new.digest, new.buffers, new.shape))
            extents.append([Extent(fd, offset, [header, *filter(len, new.buffers)])])
            there.append(at)
        ends = self._slots.transfers.move(extents, stop, deadline, reads=False)
        for at, end in zip(there, ends, strict=True):
            moved[at] = end
        return moved

    def _commit_of(self, new: _New, lent: Reservation) -> Commit:
        place, offset = place_of(lent.slot, self._slots.settings)
        present, nbytes = new.shape.present, new.shape.nbytes
        entry = Entry(new.digest, place, offset, nbytes, present, lent.generation)
        kept = is_record(StoredObject(name=new.name, shape=new.shape, age_s=None))
        return Commit(entry, lent.slot, new.replaces, kept)

    def _fits(self, shape: ObjectShape) -> bool:
        room = self._slots.settings.slot_bytes - HEADER_BYTES
        if shape.nbytes <= room:
            return True
        self._slots.complaints.say(
            "size",
            "objects of %d bytes do not fit into slots with room for %d and are not stored; give "
            "slot_bytes=%d, or more for larger ones, with a new index and a new directory",
            shape.nbytes,
            room,
            slot_bytes_for(shape.nbytes),
        )
        return False

    def _log_waste(self, new: Sequence[_New]) -> None:
        """Warn that `slot_bytes` is too large if pages fill only a small fraction of their slots."""
        if len(new) < _PAGES_MIN:
            return
        payload = max(each.shape.nbytes for each in new)
        largest, enough = HEADER_BYTES + payload, slot_bytes_for(payload)
        slot_bytes = self._slots.settings.slot_bytes
        if largest * _WASTE <= slot_bytes and enough < slot_bytes:
            self._slots.complaints.say(
                "waste",
                "pages of %d bytes with their headers fill %.1f %% of slots of %d bytes; give "
                "slot_bytes=%d, or what the largest pages of this store need, with a new index and a "
                "new directory",
                largest,
                100 * largest / slot_bytes,
                slot_bytes,
                enough,
            )


def _as_given(new: _New, todo: Sequence[_New]) -> _New:
    """Return the original of `new` in `todo`, without columns added from an existing object."""
    return next(each for each in todo if each.at == new.at)
