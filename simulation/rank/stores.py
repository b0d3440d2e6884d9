"""The stores of a simulated rank by URI, and a store as opened by one process."""

from typing import Protocol

from ..world.violated import Record
from .memory import SimulatedStore

FIRST_STORE = "memory://"
"""The store with which a group starts, if any."""
OTHER_STORE = "memory://other"


class PageSource(Protocol):
    """A source of pages: a store, or another group that serves them."""

    @property
    def closed(self) -> bool:
        """Whether the source is closed, so that calls that still hang have no effect."""
        ...

    def touch(self, who: str) -> None:
        """Record an access; a closed source reports a finding."""
        ...

    def has(self, pool: str, key: bytes) -> bool:
        """Return whether the object exists."""
        ...

    def begin(self, pool: str, key: bytes) -> None:
        """Start to read an object."""
        ...

    def read(self, pool: str, key: bytes) -> int | None:
        """Complete a read; return the content, or None if it is not available."""
        ...

    def remove(self, pool: str, key: bytes) -> None:
        """Lose one object."""
        ...


class RankStores:
    """One rank's objects in each store. It outlives the group's processes."""

    def __init__(self, meanings: dict[tuple[str, bytes], int], rank: int) -> None:
        self._meanings = meanings
        self._rank = rank
        self._stores: dict[str, SimulatedStore] = {}

    def named(self, uri: str) -> SimulatedStore:
        """Return the store of a URI, creating it on first use."""
        return self._stores.setdefault(uri, SimulatedStore(self._meanings, self._rank))


class OpenStore:
    """A store as opened by one process; an access after its close is a finding."""

    def __init__(self, uri: str, store: SimulatedStore, record: Record, rank: int) -> None:
        self.uri = uri
        self.closed = False
        self._store = store
        self._record = record
        self._rank = rank

    def touch(self, who: str) -> None:
        """Record an access; report a finding if the store is closed."""
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
        """Record that an object needs no further write, whether it exists or not."""
        self._store.accepted.add((pool, key))

    def remove(self, pool: str, key: bytes) -> None:
        self._store.remove(pool, key)
