"""The contract of an L3 backend.

A backend maps object names to bytes. It is asynchronous and batched, and it reads into and writes
from buffers that the caller owns. One contract suite (`tests/kit/storage/contract.py`) holds every
backend to these promises:

S1  Each call returns one outcome for each key, in the order of the request, and raises nothing for
    what goes wrong with a key.
S2  Every call has a deadline. What is not done by then is TIMED_OUT.
S3  The buffers of a call belong to the backend until the call returns, also when it is cancelled:
    it returns only once nothing touches them any more. (A caller that must go on sooner leaves the
    buffers alone until then.)
S4  A read is OK only if the buffers hold exactly the bytes that were written for those parts of the
    object under that name, as checksums show. Anything else is MISSING, CORRUPT or LACKING, and what
    the buffers hold is undefined.
S5  A write is visible whole or not at all, to readers in any process, also after a crash.
S6  The first writer of a name wins. A later one learns it (PRESENT), and the object is unchanged.
S7  `exists` is a hint. It may be wrong in both directions; only a read decides.
S8  An object consists of parts (`object_shape`), and says which optional columns it has. A read gets
    the parts that it asks for out of an object that has more, and verifies those; an object that
    lacks a column of them is LACKING: a miss. A write that brings a column which the object lacks
    replaces it, whole and at once, by one that has the columns of both; otherwise S6 holds. So
    presence only grows.
S9  A store that removes objects by itself removes the least recently used first, and no object counts
    as used later than one that it continues: so ends go before roots. Those of a call of `write`
    continue each other in their order, and the first of them continues its `after`: it counts as used
    when that was. Stores whose objects are evicted by others (a server, the life cycle of a bucket)
    do not promise this.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from ..page_format.object_name import ObjectName
from ..page_format.object_shape import ObjectShape


class ReadOutcome(IntEnum):
    """What became of reading one key."""

    OK = 0
    """The buffer holds the object's bytes, verified."""
    MISSING = 1
    """There is no such object."""
    CORRUPT = 2
    """There is something under this name that is not the object; it will not be served again."""
    FAILED = 3
    """The store could not be asked or did not answer properly."""
    TIMED_OUT = 4
    """The deadline passed first."""
    LACKING = 5
    """There is an object without an optional column that was asked for; to the reader it is missing."""


class WriteOutcome(IntEnum):
    """What became of writing one key."""

    OK = 0
    """The object is stored, as durably as the store was configured to."""
    PRESENT = 1
    """Somebody wrote it before, with these columns at least; its bytes are unchanged."""
    FAILED = 3
    """It was not stored."""
    TIMED_OUT = 4
    """The deadline passed first; the object may or may not appear."""


class Read(NamedTuple):
    """Read some parts of the object into `buffers`, one after the other.

    The buffers together are as long as the parts that `shape` holds. They may not overlap those of
    another read in flight.
    """

    name: ObjectName
    buffers: tuple[memoryview, ...]
    shape: ObjectShape


class After(NamedTuple):
    """The object that another one continues."""

    name: ObjectName
    distance: int = 1
    """Which of the objects that continue it one after the other this is."""


class Write(NamedTuple):
    """Write the bytes of `buffers`, one after the other, as the object: all parts of it.

    To write an object that is PRESENT is to use it. That is cheap, and tells who asks whether it is
    there still.
    """

    name: ObjectName
    buffers: tuple[memoryview, ...]
    shape: ObjectShape
    after: After | None = None
    """The object that the first one of a call continues, in all objects of the call; see S9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store says of one object without anybody having asked for it by name."""

    name: ObjectName
    shape: ObjectShape
    """Holding all parts that the object has."""
    age_s: float | None
    """Since it was written or last used, as the store's clock says; None where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do beyond the contract, and what it needs."""

    lists: bool = False
    """`objects` tells what is in the store."""
    shared: bool = True
    """Other processes see what is written."""
    writes: bool = True
    """Pages can be written to it."""
    zero_copy: bool = False
    """Bytes go straight between the store and memory that `open` was told of."""


class StorageBackend(Protocol):
    """One store, used from one asyncio event loop. Deadlines are on `time.monotonic`'s scale."""

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do; the same before and after `open`."""
        ...

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Make the store ready, or raise `ConfigError` with the thing and the remedy.

        `memory` is where most buffers of later calls will lie: a backend may register it, so that
        bytes go straight there. It stays valid until the backend has been closed.
        """
        ...

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Say for each name whether the object seems to be there; False where it cannot be told."""
        ...

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers."""
        ...

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Write the objects."""
        ...

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; True where the name is free afterwards."""
        ...

    def objects(self) -> AsyncIterator[StoredObject]:
        """Yield what is in the store, in any order, as far as it is sound; see `Capabilities.lists`.

        What is written or removed meanwhile may be told or not. Raises `UsageError` where the store
        cannot list.
        """
        ...

    async def close(self) -> None:
        """Give back what the backend holds, leaving no temporary object behind. Idempotent."""
        ...
