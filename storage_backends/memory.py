"""`memory://` and `memory://name`: the reference backend, nothing but a dictionary.

It keeps every object as the header and the payload that a file would have, and checks them on every
read, so that it gives the same outcomes for the same reasons. `memory://name` is one store for all
backends with that name in this process, as long as one of them exists; `memory://` is private.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ..errors import ConfigError
from .base import Counters, ObjectName, Read, ReadOutcome, Write, WriteOutcome
from .optional_columns import OptionalColumns
from .page_object import (
    Finding,
    check_header,
    check_payload,
    encode_header,
    name_digest,
    payload_checksum,
    presence_bits,
)
from .tally import Tally
from .uri import StoreUri

_NAME = re.compile(r"[a-z0-9.-]{1,128}")


Stored = tuple[bytes, bytes]
"""Header and payload."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Shelf:
    """The objects of one store, by the digest of their names.

    Safe to use from several threads: to look something up or to add it is one operation on the
    dictionary, and whoever changes or takes away what is there holds the lock.
    """

    objects: dict[bytes, Stored] = field(default_factory=dict[bytes, Stored])
    lock: threading.Lock = field(default_factory=threading.Lock)


_shelves: WeakValueDictionary[str, Shelf] = WeakValueDictionary()


class MemoryBackend:
    """Keeps the contract of `StorageBackend` with nothing that can fail.

    Calls copy whole payloads on the event loop, in place of I/O.
    """

    def __init__(
        self, shelf: Shelf | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.shelf = shelf if shelf is not None else Shelf()
        self._clock = clock if clock is not None else time.monotonic
        self._tally = Tally()
        self._open = False

    async def open(self) -> None:
        """Make the store ready."""
        self._open = True

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Say for each name whether the object is there."""
        if not self._open or self._clock() >= deadline:
            return [False] * len(names)
        objects = self.shelf.objects
        return [name_digest(name) in objects for name in names]

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Copy the objects into their buffers."""
        return self._tally.reads(reads, [self._read(read, deadline) for read in reads])

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Keep copies of the buffers."""
        return self._tally.writes(writes, [self._write(write, deadline) for write in writes])

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; True where the name is free afterwards."""
        if not self._open or self._clock() >= deadline:
            return [False] * len(names)
        digests = [name_digest(name) for name in names]
        for digest in digests:
            if digest is not None:
                self.shelf.objects.pop(digest, None)
        return [digest is not None for digest in digests]

    def counters(self) -> Counters:
        """Return what was seen since the backend was made."""
        return self._tally.counters()

    async def close(self) -> None:
        """Stop serving. A private store is gone with its backend, a named one with its last."""
        self._open = False

    def _read(self, read: Read, deadline: float) -> ReadOutcome:
        digest = name_digest(read.name)
        if digest is None or not self._open:
            return ReadOutcome.FAILED
        if self._clock() >= deadline:
            return ReadOutcome.TIMED_OUT
        found = self.shelf.objects.get(digest)
        if found is None:
            return ReadOutcome.MISSING
        header, payload = found
        finding = _check(found, digest, read.buffer.nbytes, read.optional)
        if finding is Finding.LACKING:
            return ReadOutcome.LACKING
        if finding not in (Finding.SOUND, Finding.FULLER):
            with self.shelf.lock:
                if self.shelf.objects.get(digest) is found:
                    del self.shelf.objects[digest]
            return ReadOutcome.CORRUPT
        buffer = read.buffer.cast("B")
        if finding is Finding.SOUND:
            buffer[:] = payload
        else:
            read.optional.pick(memoryview(payload), presence_bits(header), buffer)
        return ReadOutcome.OK

    def _write(self, write: Write, deadline: float) -> WriteOutcome:
        digest = name_digest(write.name)
        if digest is None or not self._open:
            return WriteOutcome.FAILED
        if self._clock() >= deadline:
            return WriteOutcome.TIMED_OUT
        optional, objects = write.optional, self.shelf.objects
        kept = _object(digest, bytes(write.buffer), optional.present)
        if objects.setdefault(digest, kept) is kept:
            return WriteOutcome.OK
        if not optional.present:
            return WriteOutcome.PRESENT
        with self.shelf.lock:
            standing = objects.setdefault(digest, kept)
            if standing is not kept:
                fuller = _fuller(standing, kept, digest, optional)
                if fuller is None:
                    return WriteOutcome.PRESENT
                objects[digest] = fuller
        return WriteOutcome.OK


def _object(digest: bytes, payload: bytes, present: int) -> Stored:
    return encode_header(digest, len(payload), payload_checksum(payload), present), payload


def _check(stored: Stored, digest: bytes, buffer_bytes: int, optional: OptionalColumns) -> Finding:
    header, payload = stored
    finding = check_header(header, digest, buffer_bytes, optional)
    if finding not in (Finding.SOUND, Finding.FULLER, Finding.LACKING):
        return finding
    expected = optional.payload_bytes(buffer_bytes, presence_bits(header))
    if len(payload) != expected:
        return Finding.SHORT if len(payload) < expected else Finding.LONG
    sound = check_payload(header, payload_checksum(payload))
    return finding if sound is Finding.SOUND else sound


def _fuller(
    standing: Stored, ours: Stored, digest: bytes, optional: OptionalColumns
) -> Stored | None:
    """Return what is to take the place of `standing`; None if it has all columns that we have."""
    (header, payload), (_, buffer) = standing, ours
    if check_header(header, digest, len(buffer), optional) in (Finding.SOUND, Finding.FULLER):
        return None
    if _check(standing, digest, len(buffer), optional) is not Finding.LACKING:
        return ours
    present = presence_bits(header)
    united = optional.unite(memoryview(buffer), memoryview(payload), present)
    return _object(digest, bytes(united), optional.present | present)


def from_uri(uri: StoreUri) -> MemoryBackend:
    """Return the backend of a `memory://` or `memory://name` URI."""
    uri.only_options(())
    if uri.path not in ("", "/"):
        raise ConfigError(f"store {uri.text!r} has a path; write memory:// or memory://name")
    if not uri.host:
        return MemoryBackend()
    if _NAME.fullmatch(uri.host) is None:
        raise ConfigError(
            f"store {uri.text!r}: the name {uri.host!r} may have only a-z, 0-9, '.' and '-'"
        )
    return MemoryBackend(_shelves.setdefault(uri.host, Shelf()))
