"""`memory://` and `memory://name`: the reference backend, a dictionary in this process.

Each object is kept as the header and payload that a file of `file://` would have, and checked on every
read, so the outcomes equal those of other backends. All backends of this process with the same name
share one store as long as one of them exists. The store of a `memory://` without a name is not shared.
"""

import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ..coordinator.validated_settings import Settings
from ..errors import ConfigError
from ..page_format.object_header import (
    HeaderFinding,
    check_header,
    check_object,
    encode_object,
    extract_parts,
    presence_bits,
    read_statement,
)
from ..page_format.object_name import ObjectName, name_digest
from ..page_format.object_shape import ObjectShape
from .base import Capabilities, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from .buffers import fitting
from .uri import StoreUri

_NAME = re.compile(r"[a-z0-9.-]{1,128}")


Stored = tuple[bytes, bytes]
"""(header, payload) of an object."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Shelf:
    """The objects of one store, keyed by the digests of their names.

    Thread-safe, because a look-up or an insertion is one atomic operation on the dictionary, and a
    thread that replaces or removes an object holds the lock.
    """

    objects: dict[bytes, Stored] = field(default_factory=dict[bytes, Stored])
    lock: threading.Lock = field(default_factory=threading.Lock)


_shelves: WeakValueDictionary[str, Shelf] = WeakValueDictionary()


class MemoryBackend:
    """A `StorageBackend` that keeps objects in this process's memory and does no I/O.

    Calls run on the event loop, and copy whole payloads there.
    """

    def __init__(
        self, shelf: Shelf | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.shelf = shelf if shelf is not None else Shelf()
        self.clock = clock if clock is not None else time.monotonic
        self._open = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(lists=True, shared=False)

    async def open(self, memory: Sequence[memoryview] = ()) -> None:  # noqa: ARG002 - any memory will do.
        """Make the backend usable; the store needs no connection."""
        self._open = True

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether the object exists."""
        if not self._open or self.clock() >= deadline:
            return [False] * len(names)
        objects = self.shelf.objects
        return [name_digest(name) in objects for name in names]

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Copy the objects into their buffers."""
        return [self._read(read, deadline) for read in reads]

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Store copies of the objects, and return one outcome per write."""
        return [self._write(write, deadline) for write in writes]

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; return for each name whether the name is free afterwards."""
        if not self._open or self.clock() >= deadline:
            return [False] * len(names)
        digests = [name_digest(name) for name in names]
        for digest in digests:
            if digest is not None:
                self.shelf.objects.pop(digest, None)
        return [digest is not None for digest in digests]

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects in the store; see `StorageBackend`."""
        for header, _ in list(self.shelf.objects.values()) if self._open else ():
            statement = read_statement(memoryview(header))
            if not isinstance(statement, HeaderFinding):
                yield StoredObject(name=statement.name, shape=statement.shape, age_s=None)

    async def close(self) -> None:
        """Refuse later calls. The objects are freed when the store's last backend is freed."""
        self._open = False

    def _read(self, read: Read, deadline: float) -> ReadOutcome:
        digest = name_digest(read.name)
        if digest is None or not self._open:
            return ReadOutcome.FAILED
        if self.clock() >= deadline:
            return ReadOutcome.TIMED_OUT
        buffers = fitting(read.buffers, read.shape.nbytes, writable=True)
        if buffers is None:
            return ReadOutcome.FAILED
        found = self.shelf.objects.get(digest)
        if found is None:
            return ReadOutcome.MISSING
        header, payload = memoryview(found[0]), memoryview(found[1])
        finding = check_header(header, digest, read.shape)
        if finding is HeaderFinding.LACKING:
            return ReadOutcome.LACKING
        if finding is HeaderFinding.SOUND:
            finding = extract_parts(payload, header, buffers, read.shape)
        if finding is HeaderFinding.SOUND:
            return ReadOutcome.OK
        with self.shelf.lock:
            if self.shelf.objects.get(digest) is found:
                del self.shelf.objects[digest]
        return ReadOutcome.CORRUPT

    def _write(self, write: Write, deadline: float) -> WriteOutcome:
        digest = name_digest(write.name)
        if digest is None or not self._open:
            return WriteOutcome.FAILED
        if self.clock() >= deadline:
            return WriteOutcome.TIMED_OUT
        objects, buffers = self.shelf.objects, fitting(write.buffers, write.shape.nbytes)
        if buffers is None:
            return WriteOutcome.FAILED
        if digest in objects and not write.shape.present:
            return WriteOutcome.PRESENT
        kept = _encoded(write.name, digest, buffers, write.shape)
        if objects.setdefault(digest, kept) is kept:
            return WriteOutcome.OK
        if not write.shape.present:
            return WriteOutcome.PRESENT
        with self.shelf.lock:
            standing = objects.setdefault(digest, kept)
            if standing is not kept:
                fuller = _fuller(standing, write, digest, buffers)
                if fuller is None:
                    return WriteOutcome.PRESENT
                objects[digest] = fuller
        return WriteOutcome.OK


def _encoded(
    name: ObjectName, digest: bytes, buffers: Sequence[memoryview], shape: ObjectShape
) -> Stored:
    return encode_object(name, digest, buffers, shape), b"".join(buffers)


def _fuller(
    standing: Stored, write: Write, digest: bytes, buffers: Sequence[memoryview]
) -> Stored | None:
    """Return the replacement of `standing`: the object of `write` plus other columns of `standing`.

    Returns None if `standing` has all columns of `write`, so that no replacement is needed.
    """
    header, payload = memoryview(standing[0]), memoryview(standing[1])
    finding = check_header(header, digest, write.shape)
    if finding is HeaderFinding.SOUND:
        return None
    present = presence_bits(header) if finding is HeaderFinding.LACKING else 0
    theirs = memoryview(b"".join(standing))
    if present & ~write.shape.present and not isinstance(check_object(theirs), HeaderFinding):
        united = write.shape.unite(buffers, payload, present)
        return _encoded(write.name, digest, [united], write.shape.with_columns(present))
    return _encoded(write.name, digest, buffers, write.shape)


def from_uri(uri: StoreUri) -> MemoryBackend:
    """Return the backend of a `memory://` or `memory://name` URI."""
    uri.read(Settings)
    if uri.path not in ("", "/"):
        raise ConfigError(f"store {uri.text!r} has a path; write memory:// or memory://name")
    if not uri.host:
        return MemoryBackend()
    if _NAME.fullmatch(uri.host) is None:
        raise ConfigError(f"store {uri.text!r}: the name may have only a-z, 0-9, '.' and '-'")
    return MemoryBackend(_shelves.setdefault(uri.host, Shelf()))
