"""The stores of a simulated rank by URI, and one of them as a process has opened it."""

from typing import Protocol

from ..world.violated import Record
from .memory import SimulatedStore

FIRST_STORE = "memory://"
"""The store that a group starts with, if it starts with one."""
OTHER_STORE = "memory://other"


class Origin(Protocol):
    """Where pages are read from: a store, or another group that serves them."""

    @property
    def closed(self) -> bool:
        """Whether calls that hang come to nothing."""
        ...

    def touch(self, who: str) -> None:
        """Note that something begins to use it."""
        ...

    def has(self, pool: str, key: bytes) -> bool:
        """Say whether an object is there."""
        ...

    def begin(self, pool: str, key: bytes) -> None:
        """Begin to read an object."""
        ...

    def read(self, pool: str, key: bytes) -> int | None:
        """End a read; return the content, or None if it was not to be had."""
        ...

    def remove(self, pool: str, key: bytes) -> None:
        """Lose one object."""
        ...


class RankStores:
    """What one rank reaches of each store. It outlives the processes of the group."""

    def __init__(self, meanings: dict[tuple[str, bytes], int], rank: int) -> None:
        self._meanings = meanings
        self._rank = rank
        self._stores: dict[str, SimulatedStore] = {}

    def named(self, uri: str) -> SimulatedStore:
        """Return the store of a URI; it is made when it is named first."""
        return self._stores.setdefault(uri, SimulatedStore(self._meanings, self._rank))


class OpenStore:
    """A store as one process has opened it; nothing may touch it after it was closed."""

    def __init__(self, uri: str, store: SimulatedStore, record: Record, rank: int) -> None:
        self.uri = uri
        self.closed = False
        self._store = store
        self._record = record
        self._rank = rank

    def touch(self, who: str) -> None:
        """Note that something begins to use the store."""
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
        """Note that an object need not be written any more, whether it is there or not."""
        self._store.accepted.add((pool, key))

    def remove(self, pool: str, key: bytes) -> None:
        self._store.remove(pool, key)
