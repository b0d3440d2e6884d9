"""Objects in batches of bounded size, worked on a few batches at a time, in memory that is reused."""

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
"""A page is some megabytes. What claims to be larger than this is not read, since nobody has said
that there is memory for it."""
ANY_BYTES: Final = 1 << 62
"""The bound of a batch whose objects are only named, and not read."""

NAMED_MAX: Final = 10
"""How many objects are named of each kind that should not be."""

Batch = Sequence[StoredObject]


@dataclass(slots=True)
class Defects:
    """Counts the objects that met one end, and keeps the first of them."""

    objects: int = 0
    first: list[ObjectName] = field(default_factory=list[ObjectName])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """How many met it in which way, where there are several: `failed`, `timed out`, and so on."""

    def add(self, name: ObjectName, outcome: str | None = None) -> None:
        """Count one object more."""
        self.objects += 1
        if outcome is not None:
            self.outcomes[outcome] += 1
        if len(self.first) < NAMED_MAX:
            self.first.append(name)


class Scratch:
    """Memory that one worker reads into, as large as its largest batch so far."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def buffers(self, shapes: Sequence[ObjectShape]) -> list[memoryview]:
        """Return a buffer for each shape. They hold until the next call."""
        sizes = [shape.nbytes for shape in shapes]
        if sum(sizes) > len(self._memory):
            # The old memory goes first, so that there are never two.
            self._memory = memoryview(bytearray())
            self._memory = memoryview(bytearray(sum(sizes)))
        buffers: list[memoryview] = []
        at = 0
        for size in sizes:
            buffers.append(self._memory[at : at + size])
            at += size
        return buffers


async def in_batches(objects: AsyncIterator[StoredObject], nbytes_max: int) -> AsyncIterator[Batch]:
    """Yield the objects in their order, in batches that are as large as one may be."""
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
    """Call `work` for all objects, batch by batch, for `jobs` batches at a time.

    A batch has at most `BATCH_OBJECTS` objects and `nbytes_max` bytes, or is one larger object.

    Each call has scratch memory that is its own meanwhile. The first error ends all of it.
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
        # A worker that was cancelled still waits until the store leaves its memory alone.
        await asyncio.gather(*tasks, return_exceptions=True)


async def only(
    objects: AsyncIterator[StoredObject], wanted: Callable[[StoredObject], bool]
) -> AsyncIterator[StoredObject]:
    """Yield those objects that are wanted."""
    async for stored in objects:
        if wanted(stored):
            yield stored


async def these(objects: Sequence[StoredObject]) -> AsyncIterator[StoredObject]:
    """Yield objects that are known already."""
    for stored in objects:
        yield stored
