"""The contract of an L3 backend.

A backend maps object names to bytes. It is asynchronous and batched, and it reads into and writes
from buffers that the caller owns. One contract suite (`tests/storage_contract.py`) holds every
backend to these promises:

S1  Each call returns one outcome for each key, in the order of the request, and raises nothing for
    what goes wrong with a key.
S2  Every call has a deadline. What is not done by then is TIMED_OUT.
S3  The buffers of a call belong to the backend until the call returns, also when it is cancelled:
    it returns only once nothing touches them any more. (A caller that must go on sooner leaves the
    buffers alone until then.)
S4  A read is OK only if the buffer holds exactly the bytes that were written under that name, as a
    checksum shows. Anything else is MISSING or CORRUPT, and the buffer's content is undefined.
S5  A write is visible whole or not at all, to readers in any process, also after a crash.
S6  The first writer of a name wins. A later one learns it (PRESENT), and the object is unchanged.
S7  `exists` is a hint. It may be wrong in both directions; only a read decides.
S8  An object says which optional columns it has (`optional_columns`). A read gets the columns that it
    asks for out of an object that has more, all of which is verified; an object that lacks one of
    them is LACKING: a miss. A write that brings a column which the object lacks replaces it, whole
    and at once, by one that has the columns of both; otherwise S6 holds. So presence only grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from .optional_columns import NONE_OPTIONAL, OptionalColumns


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


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The name of one stored object. All parts are safe in paths: hex digits, or [a-z0-9.-].

    `namespace` is the hex digest of everything that must agree before bytes may be shared (model,
    weights, dtype, layout, tenant, adapter); `key` the hex digest of the token prefix; `pool` and
    `shard` say which part of the page it is.
    """

    namespace: str
    key: str
    pool: str
    shard: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read the object into `buffer`, whose length is the object's expected length in bytes.

    That is the length of all columns that are not optional, and of those optional ones that are
    asked for.
    """

    name: ObjectName
    buffer: memoryview
    optional: OptionalColumns = NONE_OPTIONAL
    """The layout's, and which of them the buffer has room for and asks for."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write the bytes of `buffer` as the object."""

    name: ObjectName
    buffer: memoryview
    optional: OptionalColumns = NONE_OPTIONAL
    """The layout's, and which of them the buffer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a backend has seen since it was opened; all cumulative."""

    reads_ok: int = 0
    reads_missing: int = 0
    reads_corrupt: int = 0
    reads_lacking: int = 0
    """Objects without an optional column that was asked for; each was a miss."""
    reads_failed: int = 0
    writes_ok: int = 0
    writes_present: int = 0
    writes_failed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class StorageBackend(Protocol):
    """One store, used from one asyncio event loop. Deadlines are on `time.monotonic`'s scale."""

    async def open(self) -> None:
        """Make the store ready, or raise `ConfigError` with the thing and the remedy."""
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

    def counters(self) -> Counters:
        """Return what was seen since `open`."""
        ...

    async def close(self) -> None:
        """Give back what the backend holds, leaving no temporary object behind. Idempotent."""
        ...
