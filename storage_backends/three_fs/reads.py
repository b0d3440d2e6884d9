"""Blocking reads of objects in slots of `3fs://`, called from several threads.

The index maps an object to a slot (`page_index`), but only the bytes prove which object is there. So a
read looks an object up, reads and verifies it, and queries the index again. If the entry has another
generation at the second query, the slot may have been reserved again during the read. Then the bytes
are not used, even if their checksums are right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...errors import StorageError
from ...page_format.object_header import (
    HEADER_BYTES,
    HeaderFinding,
    PartHashes,
    check_header,
    presence_bits,
    read_statement,
    stated_checksums,
)
from ...page_format.object_name import ObjectName, name_digest
from ...page_format.object_shape import ObjectShape, pieces_of
from ..base import Read, ReadOutcome, StoredObject
from ..error_log import ErrorLog
from ..threaded_backend import Stop
from .files import SlotFiles, WrongFileError
from .index_calls import IndexCalls, LateError
from .page_index import Entry, PageIndex, SlotSizes
from .transfers import Extent, MovedObject, Transfers

_READ_TRIES: Final = 8
"""Maximum attempts of one read; an attempt fails only if a writer has replaced the object meanwhile."""
_READ_AT_A_TIME: Final = 256

_OUTCOMES: Final = {
    MovedObject.SHORT: ReadOutcome.CORRUPT,
    MovedObject.FAILED: ReadOutcome.FAILED,
    MovedObject.LATE: ReadOutcome.TIMED_OUT,
}


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """An open store: its files, index, transfers and slot sizes, and its log of errors."""

    files: SlotFiles
    index: IndexCalls
    transfers: Transfers
    settings: SlotSizes
    complaints: ErrorLog


class PlacedRead(NamedTuple):
    """A read of an object, with the object's index entry."""

    read: Read
    entry: Entry


class SlotReads:
    """Reads the objects of one store. Methods may block; a failure of one key never raises.

    With `read_only` no read counts as use, and corrupt objects stay in the index.
    """

    def __init__(self, slots: OpenSlots, *, read_only: bool) -> None:
        self._slots = slots
        self._read_only = read_only

    async def look_up(
        self, names: Sequence[ObjectName], deadline: float
    ) -> list[Entry | ReadOutcome]:
        """Look the objects up in the index, with one query; return for each its entry or an outcome.

        The outcome is MISSING if there is no entry, TIMED_OUT if the index is late, and FAILED after an
        error.
        """

        def ask(index: PageIndex) -> tuple[list[bytes | None], list[Entry | None]]:
            digests = [name_digest(name) for name in names]
            return digests, index.look_up([digest for digest in digests if digest is not None])

        try:
            digests, known = await self._slots.index.ask(ask, deadline)
        except LateError:
            return [ReadOutcome.TIMED_OUT] * len(names)
        except StorageError as error:
            self._slots.complaints.say("index", "%s", error)
            return [ReadOutcome.FAILED] * len(names)
        entries = iter(known)
        return [
            ReadOutcome.FAILED if digest is None else next(entries) or ReadOutcome.MISSING
            for digest in digests
        ]

    def read(self, wanted: Sequence[PlacedRead], stop: Stop) -> list[ReadOutcome]:
        """Read objects into their buffers and verify them. Drop corrupt objects from the index."""
        outcomes = [ReadOutcome.MISSING] * len(wanted)
        for start in range(0, len(wanted), _READ_AT_A_TIME):
            todo = list(enumerate(wanted[start : start + _READ_AT_A_TIME], start))
            for _ in range(_READ_TRIES):
                if stop.due():
                    for at, _ in todo:
                        outcomes[at] = ReadOutcome.TIMED_OUT
                    break
                todo = self._read(todo, outcomes, stop)
                if not todo:
                    break
        return outcomes

    def objects(self, stop: Stop) -> Iterator[StoredObject]:
        """Yield the stored objects with a valid header.

        Raises `StorageError` if any object cannot be read, because the listing would be incomplete.
        """
        for some in self._slots.index.entries(stop):
            headers = [memoryview(bytearray(HEADER_BYTES)) for _ in some]
            extents: list[list[Extent]] = []
            for used, header in zip(some, headers, strict=True):
                fd = self._fd(used.entry)
                if fd is ReadOutcome.FAILED:
                    raise StorageError(f"{used.entry.place} cannot be opened")
                # `fd` is a descriptor or a `ReadOutcome`. Check the type first, because a `ReadOutcome`
                # is an integer too.
                lost = isinstance(fd, ReadOutcome)
                extents.append([] if lost else [Extent(fd, used.entry.offset, (header,))])
            there = [at for at, each in enumerate(extents) if each]
            moved = self._slots.transfers.move(
                [extents[at] for at in there], stop, stop.deadline, reads=True
            )
            for at, each in zip(there, moved, strict=True):
                if each in (MovedObject.FAILED, MovedObject.LATE):
                    why = "cannot be read" if each is MovedObject.FAILED else "was not read in time"
                    raise StorageError(f"{some[at].entry.place} {why}")
                statement = read_statement(headers[at])
                if each is not MovedObject.WHOLE or isinstance(statement, HeaderFinding):
                    continue
                if name_digest(statement.name) == some[at].entry.key:
                    age_s = some[at].age_s
                    yield StoredObject(name=statement.name, shape=statement.shape, age_s=age_s)

    def _read(
        self, todo: list[tuple[int, PlacedRead]], outcomes: list[ReadOutcome], stop: Stop
    ) -> list[tuple[int, PlacedRead]]:
        """Try once to read objects; return those whose index entry has changed, with the new entry."""
        fetched = self.fetch([found for _, found in todo], stop)
        # Confirm in reverse order, so that the first object gets the latest time of use. If the objects
        # are the pages of a prefix, later ones must be evicted before earlier ones.
        keys = [found.entry.key for _, found in reversed(todo)]
        wrong: list[Entry] = []
        again: list[tuple[int, PlacedRead]] = []
        try:
            now = self._slots.index.call(
                lambda index: index.look_up(keys) if self._read_only else index.confirm(keys), stop
            )[::-1]
        except StorageError as error:
            for at, _ in todo:
                outcomes[at] = self._unanswered(error)
            return []
        for (at, found), outcome, current in zip(todo, fetched, now, strict=True):
            outcomes[at] = outcome
            if outcome in (ReadOutcome.FAILED, ReadOutcome.TIMED_OUT):
                continue
            if current is None or current.generation != found.entry.generation:
                outcomes[at] = ReadOutcome.MISSING
                if current is not None:
                    again.append((at, found._replace(entry=current)))
            elif outcome is ReadOutcome.CORRUPT:
                wrong.append(current)
        if wrong and not self._read_only:
            try:
                self._slots.index.call(lambda index: index.drop(wrong), stop)
            except StorageError as error:
                self._unanswered(error)
        return again

    def _unanswered(self, error: StorageError) -> ReadOutcome:
        """Return the outcome of a read after its query of the index has raised `error`."""
        if isinstance(error, LateError):
            return ReadOutcome.TIMED_OUT
        self._slots.complaints.say("index", "%s", error)
        return ReadOutcome.FAILED

    def fetch(self, wanted: Sequence[PlacedRead], stop: Stop) -> list[ReadOutcome]:
        """Read objects from the slots that their entries name, and verify them."""
        outcomes: list[ReadOutcome] = []
        moves: list[tuple[int, memoryview, list[list[memoryview]]]] = []
        extents: list[list[Extent]] = []
        for at, (read, entry) in enumerate(wanted):
            fd = self._locate(entry, read.shape)
            if isinstance(fd, ReadOutcome):
                outcomes.append(fd)
                continue
            outcomes.append(ReadOutcome.OK)
            header = memoryview(bytearray(HEADER_BYTES))
            runs = read.shape.plan(entry.present).runs
            buffers = [buffer.cast("B") for buffer in read.buffers]
            targets = list(pieces_of(buffers, [run.nbytes for run in runs]))
            starts = [HEADER_BYTES + run.offset for run in runs]
            moves.append((at, header, targets))
            extents.append(_extents(fd, entry.offset, header, starts, targets))

        def verify(number: int) -> None:
            at, header, targets = moves[number]
            if not _is_sound(wanted[at], header, targets):
                outcomes[at] = ReadOutcome.CORRUPT

        # Verify each object on arrival, while its bytes are still in the core's cache.
        moved = self._slots.transfers.move(extents, stop, stop.deadline, reads=True, arrived=verify)
        for (at, _, _), each in zip(moves, moved, strict=True):
            if each is not MovedObject.WHOLE:
                outcomes[at] = _OUTCOMES[each]
        return outcomes

    def _locate(self, entry: Entry, shape: ObjectShape) -> int | ReadOutcome:
        """Return the descriptor to read from, or the read's outcome if the entry rules out a read."""
        slot_bytes = self._slots.settings.slot_bytes
        fits = HEADER_BYTES + entry.length <= slot_bytes and not entry.offset % slot_bytes
        if not fits or not may_be(entry, shape):
            return ReadOutcome.CORRUPT
        return ReadOutcome.LACKING if shape.lacks(entry.present) else self._fd(entry)

    def _fd(self, entry: Entry) -> int | ReadOutcome:
        try:
            return self._slots.files.fd(entry.place, create=False)
        except WrongFileError as error:
            self._slots.complaints.say(
                entry.place, "objects in %s are lost: %s", entry.place, error
            )
            return ReadOutcome.CORRUPT
        except OSError as error:
            self._slots.complaints.log_failure(f"{entry.place} cannot be opened", error.errno)
            return ReadOutcome.FAILED


def _extents(
    fd: int,
    offset: int,
    header: memoryview,
    starts: Sequence[int],
    targets: Sequence[Sequence[memoryview]],
) -> list[Extent]:
    """Return the ranges of a file to read for one object.

    The first range contains the header, and those wanted parts that directly follow the header. The
    other ranges contain the other wanted parts.
    """
    extents = [Extent(fd, offset, (header,))]
    for start, views in zip(starts, targets, strict=True):
        if start == HEADER_BYTES:
            extents[0] = Extent(fd, offset, (header, *views))
        elif views:
            extents.append(Extent(fd, offset + start, views))
    return extents


def _is_sound(
    found: PlacedRead, header: memoryview, targets: Sequence[Sequence[memoryview]]
) -> bool:
    """Return whether the bytes that were read are a valid object with the entry's key and columns."""
    read, entry = found
    if check_header(header, entry.key, read.shape) is not HeaderFinding.SOUND:
        return False
    if presence_bits(header) != entry.present:
        return False
    for run, views in zip(read.shape.plan(entry.present).runs, targets, strict=True):
        hashes = PartHashes([nbytes for _, nbytes in run.parts])
        for view in views:
            hashes.add(view)
        if hashes.joined() != stated_checksums(header, run.parts[0][0], len(run.parts)):
            return False
    return True


def may_be(entry: Entry, shape: ObjectShape) -> bool:
    """Return whether the entry's presence bits and length are possible for an object of this shape."""
    return shape.knows(entry.present) and shape.payload_bytes(entry.present) == entry.length
