"""`lockstep store copy`: the objects that another store lacks, verified on their way.

What TO has is left alone, so a copy that was interrupted goes on where it was by being started again.
Manifests go first, so that nobody meets pages without knowing what they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ...errors import ConfigError, StorageError
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import ReadOutcome, StoredObject, Write, WriteOutcome
from ...storage_backends.records.catalogue import Catalogue, FullShapes, is_manifest, stored_bytes
from ...storage_backends.records.manifest import (
    MANIFEST_BYTES,
    claim_model,
    decode_manifest,
    refuse_other_layouts,
)
from ..amounts import count
from .batches import Batch, Scratch, for_each_batch, only
from .opened_store import OpenedStore
from .opening import call_deadline, opened_target
from .survey import read_manifest
from .verify import Defects, in_words, read_whole

_CHECKED_MAX: Final = 1 << 17
"""The number of objects that a copy asks for once more: the first ones that it wrote, which a
store that is too small gives up first."""
_ASKED_AT_A_TIME: Final = 256
_NOT_READ: Final = frozenset((ReadOutcome.FAILED, ReadOutcome.TIMED_OUT))
_NOT_WRITTEN: Final = frozenset(WriteOutcome) - {WriteOutcome.OK, WriteOutcome.PRESENT}
_BATCHES_IN_VAIN_MAX: Final = 3
"""After so many batches in a row of which no object worked, a copy is given up."""


@dataclass(slots=True)
class Copied:
    """Counts what a copy has done so far."""

    objects: int = 0
    nbytes: int = 0
    present: int = 0
    """Objects that TO had already."""
    corrupt: Defects = field(default_factory=Defects)
    changed: int = 0
    """Objects that somebody removed from FROM, or wrote anew there, meanwhile."""
    unread: Defects = field(default_factory=Defects)
    unwritten: Defects = field(default_factory=Defects)
    gone: Defects = field(default_factory=Defects)
    """Objects that were written to TO and are not there any more."""
    written: list[ObjectName] = field(default_factory=list[ObjectName])
    """The first of them, at most `_CHECKED_MAX`."""


@dataclass(slots=True)
class InVain:
    """Counts the batches in a row of which a store read, or wrote, no object."""

    done: str
    """What the store should have done with the objects: `read` or `written`."""
    failures: frozenset[ReadOutcome | WriteOutcome | None]
    batches: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """What became of the objects of these batches."""

    def note(self, outcomes: Sequence[ReadOutcome | WriteOutcome | None]) -> bool:
        """Count one batch; True if there were too many."""
        failed = [each for each in outcomes if each in self.failures]
        if len(failed) < len(outcomes):
            self.batches = 0
            self.outcomes.clear()
        elif failed:
            self.batches += 1
            self.outcomes.update(map(in_words, failed))
        return self.batches >= _BATCHES_IN_VAIN_MAX


@dataclass(frozen=True, slots=True)
class StoreCopy:
    """A copy from one open store to another."""

    source: OpenedStore
    target: OpenedStore
    catalogue: Catalogue
    """What is in the source."""
    copied: Copied
    unread: InVain = field(default_factory=partial(InVain, "read", _NOT_READ))
    unwritten: InVain = field(default_factory=partial(InVain, "written", _NOT_WRITTEN))

    async def agree(self) -> None:
        """Raise `ConfigError` if the target has a model of the source in other layouts.

        Raises `StorageError` if that cannot be told. Writes nothing.
        """
        for name in self.catalogue.manifests:
            ours = await _manifest(self.source, name)
            theirs = await _manifest(self.target, name)
            if ours is not None and theirs not in (None, ours):
                self._refuse(ours, theirs)

    async def copy_manifests(self) -> None:
        """Copy the manifests that the target lacks."""
        for name, manifest in self.catalogue.manifests.items():
            content = await _manifest(self.source, name)
            if content is None:
                self.copied.unread.add(name)
                continue
            shape = ObjectShape.whole(MANIFEST_BYTES)
            write = Write(name, (memoryview(content),), shape)
            (outcome,) = await self.target.backend.write([write], deadline=call_deadline())
            self._count(name, len(content), outcome)
            if manifest is not None:
                # Somebody else may have come first since we looked.
                await claim_model(
                    self.target.backend,
                    manifest.model,
                    manifest.weights_version,
                    manifest.layouts,
                    call_deadline(),
                    store=self.target.shown,
                )

    async def copy_objects(self, jobs: int) -> None:
        """Copy all other objects, `jobs` batches at a time."""
        shapes = FullShapes(self.catalogue)

        async def carry(batch: Batch, scratch: Scratch) -> None:
            asked = await self._lacking(batch, shapes)
            outcomes, payloads = await read_whole(self.source.backend, asked, scratch)
            if self.unread.note(outcomes):
                raise self._given_up(self.source, self.unread)
            writes: list[Write] = []
            for (stored, shape), outcome, payload in zip(asked, outcomes, payloads, strict=True):
                if outcome is ReadOutcome.OK:
                    writes.append(Write(stored.name, (payload,), shape))
                else:
                    self._count_unread(stored, outcome)
            deadline = call_deadline(sum(write.shape.nbytes for write in writes))
            wrote = await self.target.backend.write(writes, deadline=deadline)
            for write, became in zip(writes, wrote, strict=True):
                self._count(write.name, write.shape.nbytes, became)
            if self.unwritten.note(wrote):
                raise self._given_up(self.target, self.unwritten)
            self.source.progress.advance(len(batch), sum(map(stored_bytes, batch)))

        objects = only(self.source.listed(), lambda each: not is_manifest(each))
        await for_each_batch(objects, jobs, carry)
        await self._check_that_there()

    async def _check_that_there(self) -> None:
        """Look whether what was written is there still: a store that is full may give it up again."""
        written = self.copied.written
        # Whoever wrote an object remembers it, so somebody else has to ask.
        async with opened_target(self.target.uri) as target:
            for start in range(0, len(written), _ASKED_AT_A_TIME):
                names = written[start : start + _ASKED_AT_A_TIME]
                there = await target.exists(names, deadline=call_deadline())
                for name, exists in zip(names, there, strict=True):
                    if not exists:
                        self.copied.gone.add(name)

    async def _lacking(
        self, batch: Batch, shapes: FullShapes
    ) -> list[tuple[StoredObject, ObjectShape]]:
        """Return what of a batch the target may lack, with the shape in which to carry it."""
        names = [stored.name for stored in batch]
        there = await self.target.backend.exists(names, deadline=call_deadline())
        lacking: list[tuple[StoredObject, ObjectShape]] = []
        for stored, exists in zip(batch, there, strict=True):
            shape = shapes.of(stored)
            # An object with optional columns may have some that the one over there lacks. One of
            # which the layout is not known is never laid over another, since the two could differ.
            if exists and (shape is None or not shape.present):
                self.copied.present += 1
            else:
                lacking.append((stored, shape or stored.shape))
        return lacking

    def _count_unread(self, stored: StoredObject, outcome: ReadOutcome | None) -> None:
        match outcome:
            case ReadOutcome.CORRUPT:
                self.copied.corrupt.add(stored.name)
            case ReadOutcome.MISSING | ReadOutcome.LACKING:
                self.copied.changed += 1
            case _:
                self.copied.unread.add(stored.name, in_words(outcome))

    def _given_up(self, store: OpenedStore, vain: InVain) -> StorageError:
        copied = self.copied
        settled = copied.objects + copied.present + copied.changed + copied.corrupt.objects
        left = max(0, self.catalogue.total.objects - settled)
        how = ", ".join(f"{number:,} {each}" for each, number in sorted(vain.outcomes.items()))
        return StorageError(
            f"store {store.shown!r}: none of the objects of {vain.batches} batches in a row "
            f"could be {vain.done} ({how}), so the copy was given up with {count(left, 'object')} "
            "left; see whether the store runs, is full or may be written, and start again"
        )

    def _count(self, name: ObjectName, nbytes: int, outcome: WriteOutcome) -> None:
        match outcome:
            case WriteOutcome.OK:
                self.copied.objects += 1
                self.copied.nbytes += HEADER_BYTES + nbytes
                if len(self.copied.written) < _CHECKED_MAX:
                    self.copied.written.append(name)
            case WriteOutcome.PRESENT:
                self.copied.present += 1
            case _:
                self.copied.unwritten.add(name, in_words(outcome))

    def _refuse(self, ours: bytes, theirs: bytes | None) -> None:
        mine = decode_manifest(ours)
        stored = None if theirs is None else decode_manifest(theirs)
        try:
            if mine is None:
                raise ConfigError("it was written by another version of Lockstep; use that one")
            refuse_other_layouts(mine, stored)
        except ConfigError as error:
            raise ConfigError(
                f"nothing was copied, because {self.target.shown} ('the store') has the same model as "
                f"{self.source.shown} ('here') in another layout: {error}"
            ) from error


def failures(copied: Copied) -> Sequence[tuple[str, Defects]]:
    """Return what went wrong with single objects, in words."""
    return (
        ("corrupt in FROM", copied.corrupt),
        ("not read from FROM", copied.unread),
        ("not written to TO", copied.unwritten),
        ("written to TO and gone from it again; it is too small for a copy of FROM", copied.gone),
    )


async def _manifest(store: OpenedStore, name: ObjectName) -> bytes | None:
    """Return the content of a manifest; None if the store has none that is sound.

    Raises `StorageError` if that cannot be told.
    """
    outcome, content = await read_manifest(store.backend, name)
    if outcome in _NOT_READ:
        raise StorageError(
            f"store {store.shown!r}: the manifest of a model could not be read: "
            f"{outcome.name}; see whether the store works, and start again"
        )
    return content if outcome is ReadOutcome.OK else None
