"""A store as one model uses it: opened only if it has the model's pages in these layouts, or none."""

import time
from collections.abc import Mapping, Sequence

from ..ranks.page_layout import PageLayout
from .base import Counters, ObjectName, Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from .manifest import claim_model

CLAIM_TIMEOUT_S = 30.0
"""How long the store may take to say which layouts it has."""


class ClaimedBackend:
    """Another backend, which `open` also claims for a model; see `StorageBackend`."""

    def __init__(
        self,
        backend: StorageBackend,
        *,
        model: str,
        weights_version: str,
        layouts: Mapping[str, PageLayout],
    ) -> None:
        self._backend = backend
        self._model = model
        self._weights_version = weights_version
        self._layouts = layouts

    async def open(self) -> None:
        """Open the store; refuse it by name if it has this model in other layouts."""
        await self._backend.open()
        try:
            deadline = time.monotonic() + CLAIM_TIMEOUT_S
            await claim_model(
                self._backend, self._model, self._weights_version, self._layouts, deadline
            )
        except BaseException:
            await self._backend.close()
            raise

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        return await self._backend.exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """See `StorageBackend`."""
        return await self._backend.read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """See `StorageBackend`."""
        return await self._backend.write(writes, deadline=deadline)

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        return await self._backend.remove(names, deadline=deadline)

    def counters(self) -> Counters:
        """See `StorageBackend`."""
        return self._backend.counters()

    async def close(self) -> None:
        """See `StorageBackend`."""
        await self._backend.close()
