"""Work on objects in batches of bounded size, a few batches in parallel, in reused memory."""

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
"""Largest object that is read. A page has a few megabytes; memory for more is not guaranteed."""
ANY_BYTES: Final = 1 << 62
"""No byte limit, for batches whose objects are named but not read."""

NAMED_MAX: Final = 10
"""Most objects that are named for each kind of defect."""

Batch = Sequence[StoredObject]


@dataclass(slots=True)
class Defects:
    """Number of objects with one kind of defect, and the names of the first ones."""

    objects: int = 0
    first: list[ObjectName] = field(default_factory=list[ObjectName])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """Number of objects by outcome (`failed`, `timed out`), if there are several."""

    def add(self, name: ObjectName, outcome: str | None = None) -> None:
        """Count one more object."""
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
        """Return a buffer for each shape, valid until the next call."""
        sizes = [shape.nbytes for shape in shapes]
        if sum(sizes) > len(self._memory):
            # Free the old memory first, so that both are never allocated together.
            self._memory = memoryview(bytearray())
            self._memory = memoryview(bytearray(sum(sizes)))
        buffers: list[memoryview] = []
        at = 0
        for size in sizes:
            buffers.append(self._memory[at : at + size])
            at += size
        return buffers


async def in_batches(objects: AsyncIterator[StoredObject], nbytes_max: int) -> AsyncIterator[Batch]:
    """Yield the objects in order, in batches as large as the limits allow."""
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

    A batch has at most `BATCH_OBJECTS` objects and `nbytes_max` bytes, or is one larger object. No two
    calls share scratch memory at the same time. The first error stops all workers.
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
        # A cancelled worker still waits until the store no longer uses its memory.
        await asyncio.gather(*tasks, return_exceptions=True)


async def only(
    objects: AsyncIterator[StoredObject], wanted: Callable[[StoredObject], bool]
) -> AsyncIterator[StoredObject]:
    """Yield the objects for which `wanted` is true."""
    async for stored in objects:
        if wanted(stored):
            yield stored


async def these(objects: Sequence[StoredObject]) -> AsyncIterator[StoredObject]:
    """Yield the objects of a sequence."""
    for stored in objects:
        yield stored
