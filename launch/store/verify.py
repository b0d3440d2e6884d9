"""`lockstep store verify`: every object read whole, in bounded memory, and what became of it."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import Read, ReadOutcome, StorageBackend, StoredObject, WriteOutcome
from ...storage_backends.records.catalogue import Catalogue, FullShapes, stored_bytes
from .batches import OBJECT_BYTES_MAX, Batch, Scratch, for_each_batch
from .damage import Corrupt, Examiner
from .opened_store import OpenedStore
from .opening import call_deadline

NAMED_MAX: Final = 10
"""How many objects are named of each kind that should not be."""


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


@dataclass(slots=True)
class Verification:
    """Counts what a verification has found so far."""

    sound: int = 0
    sound_bytes: int = 0
    corrupt: Corrupt = field(default_factory=Corrupt)
    changed: int = 0
    """Objects that somebody removed or wrote anew between listing and reading them."""
    unread: Defects = field(default_factory=Defects)
    """Objects that the store could not read in time, or that are too large to be pages."""

    @property
    def objects(self) -> int:
        """The number of objects that were looked at."""
        return self.sound + self.corrupt.objects + self.changed + self.unread.objects

    def add(self, stored: StoredObject, outcome: ReadOutcome | None) -> None:
        """Count what became of an object that is not corrupt; None for one that was not read."""
        match outcome:
            case ReadOutcome.OK:
                self.sound += 1
                self.sound_bytes += stored_bytes(stored)
            case ReadOutcome.MISSING | ReadOutcome.LACKING:
                self.changed += 1
            case _:
                self.unread.add(stored.name, in_words(outcome))


async def verify_objects(
    store: OpenedStore,
    objects: AsyncIterator[StoredObject],
    catalogue: Catalogue,
    *,
    jobs: int,
    verified: Verification,
    examiner: Examiner,
) -> None:
    """Read the objects whole, `jobs` batches at a time, and count in `verified` what comes out.

    What is corrupt goes before `examiner`, which counts it.
    """
    shapes = FullShapes(catalogue)

    async def look_at(batch: Batch, scratch: Scratch) -> None:
        asked = [(each, shapes.of(each) or each.shape) for each in batch]
        outcomes, _ = await read_whole(store.backend, asked, scratch)
        corrupt: list[tuple[ObjectName, ObjectShape]] = []
        for (stored, shape), outcome in zip(asked, outcomes, strict=True):
            if outcome is ReadOutcome.CORRUPT:
                corrupt.append((stored.name, shape))
            else:
                verified.add(stored, outcome)
        await examiner.note(corrupt)
        store.progress.advance(len(batch), sum(map(stored_bytes, batch)))

    await for_each_batch(objects, jobs, look_at)


async def read_whole(
    backend: StorageBackend,
    asked: Sequence[tuple[StoredObject, ObjectShape]],
    scratch: Scratch,
) -> tuple[list[ReadOutcome | None], list[memoryview]]:
    """Read objects in these shapes; return their outcomes, and their bytes in the scratch memory.

    The outcome is None, and there are no bytes, for an object that is too large to be read at all.
    """
    fits = [shape.nbytes <= OBJECT_BYTES_MAX for _, shape in asked]
    chosen = [each for each, fit in zip(asked, fits, strict=True) if fit]
    buffers = scratch.buffers([shape for _, shape in chosen])
    reads = [
        Read(stored.name, (buffer,), shape)
        for (stored, shape), buffer in zip(chosen, buffers, strict=True)
    ]
    deadline = call_deadline(sum(shape.nbytes for _, shape in chosen))
    outcomes = iter(await backend.read(reads, deadline=deadline))
    payloads = iter(buffers)
    return (
        [next(outcomes) if fit else None for fit in fits],
        [next(payloads) if fit else memoryview(b"") for fit in fits],
    )


def in_words(outcome: ReadOutcome | WriteOutcome | None) -> str:
    """Return how an object was not read or written; None for one that is too large for it."""
    return "too large for a page" if outcome is None else outcome.name.lower().replace("_", " ")
