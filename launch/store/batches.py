"""Process objects of a store in batches of limited size, several batches in parallel."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import StoredObject
from ...storage_backends.records.catalogue import stored_bytes

BATCH_BYTES: Final = 16 << 20
BATCH_OBJECTS: Final = 256
OBJECT_BYTES_MAX: Final = 1 << 30
"""Maximum bytes of an object that is read. Pages have a few megabytes; larger objects might not fit in
memory."""
ANY_BYTES: Final = 1 << 62
"""Byte limit for batches whose objects are not read; so high that it never applies."""

NAMED_MAX: Final = 10
"""Maximum number of objects that are listed by name for each kind of defect."""

Batch = Sequence[StoredObject]


@dataclass(slots=True)
class Defects:
    """Objects with one kind of defect: their number, and the names of the first ones."""

    objects: int = 0
    first: list[ObjectName] = field(default_factory=list[ObjectName])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """Number of objects with this defect, by outcome of the call on the object (`failed`, `timed out`).
    Empty for a kind of defect that has only one possible outcome."""

    def add(self, name: ObjectName, outcome: str | None = None) -> None:
        """Count one more object with the defect."""
        self.objects += 1
        if outcome is not None:
            self.outcomes[outcome] += 1
        if len(self.first) < NAMED_MAX:
            self.first.append(name)


class Scratch:
    """Read buffer of one worker; grows to the worker's largest batch."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def buffers(self, shapes: Sequence[ObjectShape]) -> list[memoryview]:
        """Return one buffer of the right size per object shape; the next call invalidates them."""
        sizes = [shape.nbytes for shape in shapes]
        if sum(sizes) > len(self._memory):
            # Free the old memory first, so that the old and the new memory never exist at the same
            # time.
            self._memory = memoryview(bytearray())
            self._memory = memoryview(bytearray(sum(sizes)))
        buffers: list[memoryview] = []
        at = 0
        for size in sizes:
            buffers.append(self._memory[at : at + size])
            at += size
        return buffers


async def in_batches(objects: AsyncIterator[StoredObject], nbytes_max: int) -> AsyncIterator[Batch]:
    """Yield the objects in order, as batches that are as large as the limits allow."""
    batch: list[StoredObject] = []
    nbytes = 0
    async for stored in objects:
        size = stored_bytes(stored)
        if batch and (nbytes + size > nbytes_max or len(batch) >= BATCH_OBJECTS):
            yield batch
            batch, nbytes = [], 0
        batch.append(stored)
        nbytes += size
    if batch:
        yield batch


async def for_each_batch(
    objects: AsyncIterator[StoredObject],
    jobs: int,
    work: Callable[[Batch, Scratch], Awaitable[None]],
    *,
    nbytes_max: int = BATCH_BYTES,
) -> None:
    """Call `work` for all objects, batch by batch, with `jobs` batches in parallel.

    A batch has at most `BATCH_OBJECTS` objects and `nbytes_max` bytes; one larger object is a batch by
    itself. Parallel calls never share scratch memory. The first error stops all workers.
    """
    batches = in_batches(objects, nbytes_max)
    turn = asyncio.Lock()

    async def worker() -> None:
        scratch = Scratch()
        while True:
            async with turn:
                batch = await anext(batches, None)
            if batch is None:
                return
            await work(batch, scratch)

    tasks = [asyncio.create_task(worker()) for _ in range(jobs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Wait for cancelled workers, because the store may use their memory until they end.
        await asyncio.gather(*tasks, return_exceptions=True)


async def only(
    objects: AsyncIterator[StoredObject], wanted: Callable[[StoredObject], bool]
) -> AsyncIterator[StoredObject]:
    """Yield only the objects for which `wanted` returns true."""
    async for stored in objects:
        if wanted(stored):
            yield stored


async def these(objects: Sequence[StoredObject]) -> AsyncIterator[StoredObject]:
    """Yield the objects of a sequence, as an asynchronous iterator."""
    for stored in objects:
        yield stored
