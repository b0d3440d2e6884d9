"""The stores of one simulated rank by URI, and a store as one process has opened it."""

from typing import Protocol

from ..world.violated import Record
from .memory import SimulatedStore

FIRST_STORE = "memory://"
"""URI of the store that is attached when a group starts, if the group starts with a store."""
OTHER_STORE = "memory://other"


class PageSource(Protocol):
    """A source of pages: a store, or another group that serves its pages."""

    @property
    def closed(self) -> bool:
        """Whether the source has been closed; reads and writes that end later have no effect."""
        ...

    def touch(self, who: str) -> None:
        """Record that `who` accesses this store or group; record a violation if it is closed."""
        ...

    def has(self, pool: str, key: bytes) -> bool:
        """Return whether this store or group has the object."""
        ...

    def begin(self, pool: str, key: bytes) -> None:
        """Start to read an object."""
        ...

    def read(self, pool: str, key: bytes) -> int | None:
        """Complete a read; return the object's content, or None if it is missing."""
        ...

    def remove(self, pool: str, key: bytes) -> None:
        """Remove one object, because a read found it missing or corrupt."""
        ...


class RankStores:
    """One rank's objects in all simulated stores. The objects outlive the group's processes."""

    def __init__(self, meanings: dict[tuple[str, bytes], int], rank: int) -> None:
        self._meanings = meanings
        self._rank = rank
        self._stores: dict[str, SimulatedStore] = {}

    def named(self, uri: str) -> SimulatedStore:
        """Return the store at a URI, which is created on first use."""
        return self._stores.setdefault(uri, SimulatedStore(self._meanings, self._rank))


class OpenStore:
    """A store as one process has opened it; any access after the close is a violation."""

    def __init__(self, uri: str, store: SimulatedStore, record: Record, rank: int) -> None:
        self.uri = uri
        self.closed = False
        self._store = store
        self._record = record
        self._rank = rank

    def touch(self, who: str) -> None:
        """Record a violation if the store is closed when `who` accesses it."""
        if self.closed:
            self._record(f"rank {self._rank}: {who} touches store {self.uri}, which was closed")

    def has(self, pool: str, key: bytes) -> bool:
        self.touch("a lookup")
        return self._store.has(pool, key)

    def begin(self, pool: str, key: bytes) -> None:
        del pool, key
        self.touch("a transfer")

    def read(self, pool: str, key: bytes) -> int | None:
        self.touch("a read")
        return self._store.read(pool, key)

    def write(self, pool: str, key: bytes, content: int) -> str | None:
        self.touch("a write")
        return self._store.write(pool, key, content)

    def note_accepted(self, pool: str, key: bytes) -> None:
        """Record that this rank need not write an object, even if the object does not exist."""
        self._store.accepted.add((pool, key))

    def remove(self, pool: str, key: bytes) -> None:
        self._store.remove(pool, key)
