"""The contract of an L3 backend.

A backend maps object names to bytes. It is asynchronous and batched, and uses buffers that the caller
owns. `tests/kit/storage/contract.py` checks every backend against these rules:

S1  Each call returns one outcome per key, in the order of the request. A failure of one key is an
    outcome, never an exception.
S2  Every call has a deadline. A key that is not finished by then is TIMED_OUT.
S3  The backend owns the buffers of a call until the call returns, also after a cancellation: the call
    returns only when no I/O touches the buffers any more. A caller that cannot wait must not touch the
    buffers until then.
S4  A read is OK only if checksums prove that the buffers hold exactly the bytes written for the
    requested parts of the object. Otherwise it is MISSING, CORRUPT or LACKING (or FAILED or TIMED_OUT),
    and the bytes in the buffers are undefined.
S5  A write becomes visible atomically, to readers in any process, also after a crash.
S6  The first writer of a name wins. A later writer gets PRESENT, and the object is unchanged.
S7  `exists` is a hint that may be wrong in both directions. Only a read proves that an object exists.
S8  An object consists of parts (`object_shape`), and its header records which optional columns it has.
    A read may request a subset of the parts, and verifies those. If the object lacks a requested
    column, the read is LACKING, which is a miss. If a write has a column that the object lacks, the
    write atomically replaces the object by one with the columns of the object and of the write;
    otherwise S6 holds. So the set of columns only grows.
S9  If a store itself evicts objects, it evicts the least recently used first. The objects of one
    `write` call form a chain in their order, and the first one is the successor of the object in
    `after`. An object's time of use is never later than that of its predecessor, so leaves are evicted
    before roots. Stores with external eviction (a server, a bucket's life cycle) do not promise this.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from ..page_format.object_name import ObjectName
from ..page_format.object_shape import ObjectShape


class ReadOutcome(IntEnum):
    """The outcome of reading one key."""

    OK = 0
    """The caller's buffers hold the requested parts of the object, verified by checksum."""
    MISSING = 1
    """The store has no object under this name."""
    CORRUPT = 2
    """The object under this name is invalid; the backend will not return its bytes again."""
    FAILED = 3
    """The backend could not reach the store, or the store's answer was an error or invalid."""
    TIMED_OUT = 4
    """The deadline passed before the read finished."""
    LACKING = 5
    """The object lacks a requested optional column; for the reader this is a miss."""


class WriteOutcome(IntEnum):
    """The outcome of writing one key."""

    OK = 0
    """The object is stored. The store's options define which crashes it survives."""
    PRESENT = 1
    """The object already existed with at least the columns of the write; its bytes are unchanged."""
    FAILED = 3
    """The object was not stored."""
    TIMED_OUT = 4
    """The deadline passed before the write finished. The store may or may not contain the object later.
    """


class Read(NamedTuple):
    """A request to read the parts in `shape` of one object into `buffers`.

    The parts fill the buffers one after the other. The buffers have as many bytes in total as the
    parts, and must not overlap the buffers of another read in flight.
    """

    name: ObjectName
    buffers: tuple[memoryview, ...]
    shape: ObjectShape


class After(NamedTuple):
    """A predecessor of an object in a chain, direct or indirect, and its distance from the object."""

    name: ObjectName
    distance: int = 1
    """Number of steps from the predecessor `name` to the object; 1 for the direct predecessor."""


class Write(NamedTuple):
    """A request to write the concatenated bytes of `buffers` as one object with all parts of `shape`.

    If the object already exists, the write marks it as used and returns PRESENT.
    """

    name: ObjectName
    buffers: tuple[memoryview, ...]
    shape: ObjectShape
    after: After | None = None
    """The predecessor of the first object of the `write` call (S9). All `Write`s of one call must have
    the same `after`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object, as the listing of a store reports it."""

    name: ObjectName
    shape: ObjectShape
    """The object's shape, which states the parts that the object has."""
    age_s: float | None
    """Seconds since the last write or use of the object, by the store's clock; None if the store does
    not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The optional features of a backend."""

    lists: bool = False
    """Whether `objects` can list the objects in the store."""
    shared: bool = True
    """Whether other processes see the objects that this backend writes."""
    writes: bool = True
    """Whether the store accepts writes; False if it is read-only."""
    zero_copy: bool = False
    """Whether bytes are transferred directly between the store and the memory passed to `open`."""


class StorageBackend(Protocol):
    """One store, used from one asyncio event loop. All deadlines are values of `time.monotonic`."""

    @property
    def capabilities(self) -> Capabilities:
        """Return the optional features of the backend, which are the same before and after `open`."""
        ...

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Connect to the store. Raises `ConfigError` that names the problem and the remedy.

        `memory` contains the regions in which most buffers of later calls lie. A backend may register
        them for direct transfers. The regions stay valid until the backend is closed.
        """
        ...

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether its object probably exists; False if that is unknown."""
        ...

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers, and return one outcome per read."""
        ...

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Write the objects, and return one outcome per write."""
        ...

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; return for each name whether the name is free afterwards."""
        ...

    def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the valid objects in the store, in any sequence; see `Capabilities.lists`.

        Objects written or removed during the listing may or may not appear. Raises `UsageError` if the
        store cannot list.
        """
        ...

    async def close(self) -> None:
        """Release all resources and delete the backend's temporary objects. Idempotent."""
        ...
