"""What wrappers have in common: each stands before another backend, and hands calls on to it."""

from collections.abc import AsyncIterator, Sequence

from ...page_format.object_name import ObjectName
from ..base import (
    Capabilities,
    Counters,
    Read,
    ReadOutcome,
    StorageBackend,
    StoredObject,
    Write,
    WriteOutcome,
)


class Wrapper:
    """Hands every call on to the backend behind it; a subclass says only what it changes.

    So it keeps the contract of `StorageBackend` as far as that one does, and owns it: whoever opens
    and closes the wrapper opens and closes both. `counters` stay what the store has seen; what a
    wrapper did itself, it tells by a method of its own.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._behind = backend

    @property
    def behind(self) -> StorageBackend:
        """The backend that calls are handed on to."""
        return self._behind

    @property
    def capabilities(self) -> Capabilities:
        """See `StorageBackend`."""
        return self._behind.capabilities

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """See `StorageBackend`."""
        await self._behind.open(memory)

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        return await self._behind.exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """See `StorageBackend`."""
        return await self._behind.read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """See `StorageBackend`."""
        return await self._behind.write(writes, deadline=deadline)

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        return await self._behind.remove(names, deadline=deadline)

    def objects(self) -> AsyncIterator[StoredObject]:
        """See `StorageBackend`."""
        return self._behind.objects()

    def counters(self) -> Counters:
        """See `StorageBackend`."""
        return self._behind.counters()

    async def close(self) -> None:
        """See `StorageBackend`."""
        await self._behind.close()


def layers(backend: StorageBackend) -> list[StorageBackend]:
    """Return a backend and all that stand behind it; the last one is the store itself."""
    found = [backend]
    while isinstance(backend, Wrapper):
        backend = backend.behind
        found.append(backend)
    return found
