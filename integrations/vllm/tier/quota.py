"""A bound on what one namespace keeps in a store: what was used longest ago leaves for what is new.

The bound holds for what this process knows: what it has written and read, and what was there when it
last listed the store. It lists when it opens, and again whenever it has written a part of the quota, so
several engines with one namespace may pass the quota by as much for each of them.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final

from ....errors import ConfigError, StorageError
from ....page_format.object_header import HEADER_BYTES
from ....page_format.object_name import ObjectName
from ....storage_backends.base import (
    Read,
    ReadOutcome,
    StorageBackend,
    StoredObject,
    Write,
    WriteOutcome,
)
from ....storage_backends.wrappers.base import Wrapper

LISTED_AGAIN_PART: Final = 8
"""The store is listed anew when this part of the quota was written since."""

_log = logging.getLogger("vllm.lockstep")


class NamespaceQuota(Wrapper):
    """A store in which a namespace has no more than so many bytes; headers count."""

    def __init__(self, backend: StorageBackend, namespace: str, quota_bytes: int) -> None:
        super().__init__(backend)
        self._namespace = namespace
        self._quota = quota_bytes
        self._kept: OrderedDict[ObjectName, int] = OrderedDict()
        self.held_bytes = 0
        """What the namespace has, as far as is known, with what is being written."""
        self._unlisted = 0
        self._learned: set[ObjectName] | None = None
        """While the store is listed: what was kept or left since, which the listing may miss."""
        self._room = asyncio.Lock()
        self._listing: asyncio.Task[None] | None = None

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        """Open the store and count what is there. Raises `ConfigError` for one that cannot list."""
        if not self._behind.capabilities.lists:
            raise ConfigError(
                "quota_gib needs a store that can say what is in it, and this one cannot; leave"
                " the quota away, or give another store"
            )
        await super().open(memory)
        try:
            await self._list()
        except BaseException:
            await super().close()
            raise

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """See `StorageBackend`."""
        outcomes = await super().read(reads, deadline=deadline)
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome in (ReadOutcome.MISSING, ReadOutcome.CORRUPT):
                self._forget(read.name)
            elif outcome is ReadOutcome.OK:
                self._keep(read.name, _stored_bytes(read))
        return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """See `StorageBackend`. What there is no room for is FAILED."""
        fitting, new = await self._make_room(writes, deadline)
        outcomes = [WriteOutcome.FAILED] * len(writes)
        written = await super().write([writes[at] for at in fitting], deadline=deadline)
        for at, outcome in zip(fitting, written, strict=True):
            outcomes[at] = outcome
            if outcome in (WriteOutcome.OK, WriteOutcome.PRESENT):
                self._keep(writes[at].name, _stored_bytes(writes[at]))
            elif at in new and outcome is WriteOutcome.FAILED:
                self._forget(writes[at].name)
        if self._unlisted * LISTED_AGAIN_PART >= self._quota and (
            self._listing is None or self._listing.done()
        ):
            self._unlisted = 0
            self._listing = asyncio.create_task(self._list_again())
        return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """See `StorageBackend`."""
        gone = await super().remove(names, deadline=deadline)
        for name, is_gone in zip(names, gone, strict=True):
            if is_gone:
                self._forget(name)
        return gone

    async def close(self) -> None:
        """See `StorageBackend`."""
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)
        await super().close()

    async def _make_room(
        self, writes: Sequence[Write], deadline: float
    ) -> tuple[list[int], set[int]]:
        """Return which writes fit, and which of these had their room taken just now."""
        fitting: list[int] = []
        new: set[int] = set()
        async with self._room:
            needed = sum(_stored_bytes(each) for each in writes if each.name not in self._kept)
            await self._remove_oldest(
                self.held_bytes + needed - self._quota, {each.name for each in writes}, deadline
            )
            for at, write in enumerate(writes):
                nbytes = _stored_bytes(write)
                if write.name not in self._kept:
                    if self.held_bytes + nbytes > self._quota:
                        continue
                    self._keep(write.name, nbytes)
                    self._unlisted += nbytes
                    new.add(at)
                fitting.append(at)
        return fitting, new

    async def _remove_oldest(
        self, nbytes: int, spared: Container[ObjectName], deadline: float
    ) -> None:
        """Remove so many bytes, or all but what is spared."""
        leaving: list[ObjectName] = []
        for name, each in self._kept.items():
            if nbytes <= 0:
                break
            if name not in spared:
                leaving.append(name)
                nbytes -= each
        if leaving:
            await self.remove(leaving, deadline=deadline)

    async def _list_again(self) -> None:
        try:
            await self._list()
        except StorageError as error:
            _log.warning("the store cannot be listed for its quota (%s)", error)

    async def _list(self) -> None:
        before = set(self._kept)
        learned = self._learned = set()
        try:
            found = [
                stored
                async for stored in self._behind.objects()
                if stored.name.namespace == self._namespace
            ]
        finally:
            self._learned = None
        for name in before - learned - {stored.name for stored in found}:
            self._forget(name)
        known = self._kept.keys() | learned
        news = [each for each in found if each.name not in known]
        self._put_first(sorted(news, key=lambda each: each.age_s or 0.0))

    def _put_first(self, youngest_first: Iterable[StoredObject]) -> None:
        for stored in youngest_first:
            self._keep(stored.name, _stored_bytes(stored))
            self._kept.move_to_end(stored.name, last=False)

    def _keep(self, name: ObjectName, nbytes: int) -> None:
        self.held_bytes += nbytes - self._kept.get(name, 0)
        self._kept[name] = nbytes
        self._kept.move_to_end(name)
        self._learn(name)

    def _forget(self, name: ObjectName) -> None:
        if name in self._kept:
            self.held_bytes -= self._kept.pop(name)
            self._learn(name)

    def _learn(self, name: ObjectName) -> None:
        if self._learned is not None:
            self._learned.add(name)


def _stored_bytes(each: Read | Write | StoredObject) -> int:
    return HEADER_BYTES + each.shape.nbytes
