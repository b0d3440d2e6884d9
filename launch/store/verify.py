"""`lockstep store verify`: read every object whole, in bounded memory, and report defects."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import Read, ReadOutcome, StorageBackend, StoredObject
from ...storage_backends.records.catalogue import Catalogue, FullShapes, stored_bytes
from ...storage_backends.uri import parse_uri
from ..cli.amounts import bytes_in_words, count, shown_store
from ..cli.options import Json
from .batches import (
    OBJECT_BYTES_MAX,
    Batch,
    Defects,
    Scratch,
    for_each_batch,
    only,
    these,
)
from .opened_store import OpenedStore, exit_status, reporting_partial, run_on_store
from .options import Digest, Rank, Uri, of_rank
from .store_opening import call_deadline, failures_named, is_read_only_command
from .survey import SAMPLE_MAX, StoreSample, extent_of, find_namespace, survey
from .tables import Record, found_record, print_found, print_json, say


@dataclass(slots=True)
class Verification:
    """How many objects had each outcome of the verification so far."""

    sound: int = 0
    sound_bytes: int = 0
    corrupt: Defects = field(default_factory=Defects)
    changed: int = 0
    """Number of objects that were removed or replaced after they were listed."""
    unread: Defects = field(default_factory=Defects)
    """Objects that the store could not read in time, or that are too large to be pages."""

    @property
    def objects(self) -> int:
        """Number of objects verified so far, whatever the outcome."""
        return self.sound + self.corrupt.objects + self.changed + self.unread.objects

    def add(self, stored: StoredObject, outcome: ReadOutcome | None) -> None:
        """Count an object by the outcome of its read; None means that it was too large to be read."""
        match outcome:
            case ReadOutcome.OK:
                self.sound += 1
                self.sound_bytes += stored_bytes(stored)
            case ReadOutcome.CORRUPT:
                self.corrupt.add(stored.name)
            case ReadOutcome.MISSING | ReadOutcome.LACKING:
                self.changed += 1
            case None:
                self.unread.add(stored.name, "too large for a page")
            case _:
                self.unread.add(stored.name, outcome.name.lower().replace("_", " "))


def verify(
    uri: Uri,
    /,
    *,
    namespace: Annotated[
        Digest,
        Parameter(help="Only this namespace: its digest, or a prefix of it.", show_default="all"),
    ] = None,
    sample: Annotated[
        int | None,
        Parameter(
            help="Only this many objects, drawn at random.",
            show_default="all",
            validator=Number(gte=1, lte=SAMPLE_MAX),
        ),
    ] = None,
    jobs: Annotated[
        int,
        Parameter(
            help="Batches read in parallel; each takes 16 MiB of memory, or one larger object.",
            validator=Number(gte=1, lte=64),
        ),
    ] = 4,
    fix: Annotated[
        bool, Parameter(help="Let the store move corrupt objects out of the way.")
    ] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> int:
    """Read every object whole and verify its checksum.

    Exits with 1 if an object is corrupt, with 3 if an object could not be read. In file://, 3fs:// and
    s3:// nothing is changed without --fix; other stores move a corrupt object away whenever it is read.
    """
    uri = of_rank(uri, rank)
    verified = Verification()
    taken = fix or not is_read_only_command(parse_uri(uri))

    async def read(store: OpenedStore) -> None:
        await _verify(store, verified, namespace=namespace, sample_size=sample, jobs=jobs)

    def print_result(*, so_far: bool = False) -> int:
        if as_json:
            print_json(_record(shown_store(uri), verified, so_far=so_far))
        else:
            _print(shown_store(uri), verified, so_far=so_far, taken=taken)
        return exit_status(corrupt=verified.corrupt.objects, incomplete=verified.unread.objects)

    def report_partial() -> None:
        if verified.objects:
            print_result(so_far=True)

    with failures_named(uri), reporting_partial(report_partial):
        run_on_store(uri, read, looking=not fix)
    return print_result()


async def _verify(
    store: OpenedStore,
    verified: Verification,
    *,
    namespace: str | None,
    sample_size: int | None,
    jobs: int,
) -> None:
    read_before: set[ObjectName] = set()

    def wanted(stored: StoredObject) -> bool:
        name = stored.name
        return name.namespace.startswith(namespace or "") and name not in read_before

    sample = StoreSample(sample_size, wanted) if sample_size is not None else None
    surveyed = await survey(store, sample)
    for name in surveyed.corrupt:
        verified.corrupt.add(name)
    # Skip the manifests that the listing found corrupt. They are already counted, but a read-only store
    # lists them again.
    read_before.update(surveyed.corrupt)
    if namespace is not None:
        # The option may be the beginning of a namespace's digest, so find the full digest.
        namespace = find_namespace(surveyed.catalogue, namespace, store.shown)
    objects, nbytes = _size_of(surveyed.catalogue, namespace, sample)
    store.progress.begin("reading", objects, nbytes, moves=True)
    found = these(sample.objects) if sample else store.listed()
    await _verify_objects(store, only(found, wanted), surveyed.catalogue, verified, jobs)


def _size_of(
    catalogue: Catalogue, namespace: str | None, sample: StoreSample | None
) -> tuple[int, int | None]:
    if sample is not None:
        return len(sample.objects), None
    if namespace is None:
        return catalogue.total.objects, catalogue.total.nbytes
    return extent_of(catalogue, namespace.__eq__)


async def _verify_objects(
    store: OpenedStore,
    objects: AsyncIterator[StoredObject],
    catalogue: Catalogue,
    verified: Verification,
    jobs: int,
) -> None:
    """Read all objects, `jobs` batches in parallel, and count the outcomes in `verified`."""
    shapes = FullShapes(catalogue)

    async def look_at(batch: Batch, scratch: Scratch) -> None:
        expected = [(each, shapes.of(each) or each.shape) for each in batch]
        outcomes = await _read_whole(store.backend, expected, scratch)
        for stored, outcome in zip(batch, outcomes, strict=True):
            verified.add(stored, outcome)
        store.progress.advance(len(batch), sum(map(stored_bytes, batch)))

    await for_each_batch(objects, jobs, look_at)


async def _read_whole(
    backend: StorageBackend,
    expected: Sequence[tuple[StoredObject, ObjectShape]],
    scratch: Scratch,
) -> list[ReadOutcome | None]:
    """Read each object with its expected shape; return None for an object that is too large to read."""
    fits = [shape.nbytes <= OBJECT_BYTES_MAX for _, shape in expected]
    chosen = [each for each, fit in zip(expected, fits, strict=True) if fit]
    buffers = scratch.buffers([shape for _, shape in chosen])
    reads = [
        Read(stored.name, (buffer,), shape)
        for (stored, shape), buffer in zip(chosen, buffers, strict=True)
    ]
    deadline = call_deadline(sum(shape.nbytes for _, shape in chosen))
    outcomes = iter(await backend.read(reads, deadline=deadline))
    return [next(outcomes) if fit else None for fit in fits]


def _record(shown: str, verified: Verification, *, so_far: bool) -> Record:
    return {
        "store": shown,
        "complete": not so_far,
        "objects": verified.objects,
        "sound": verified.sound,
        "sound_bytes": verified.sound_bytes,
        "corrupt": found_record(verified.corrupt),
        "changed_meanwhile": verified.changed,
        "unread": found_record(verified.unread),
    }


def _print(shown: str, verified: Verification, *, so_far: bool, taken: bool) -> None:
    read = f"{count(verified.objects, 'object')} read{' so far' if so_far else ''}"
    size = bytes_in_words(verified.sound_bytes)
    say(f"{shown}: {read}, {verified.sound:,} of them sound ({size})")
    if verified.changed:
        say(f"{count(verified.changed, 'object')} removed or replaced meanwhile: no fault")
    if verified.corrupt.objects:
        done = "moved out of the way" if taken else "--fix moves corrupt objects out of the way"
        say(f"{count(verified.corrupt.objects, 'object')} corrupt, each one a miss; {done}")
        print_found("corrupt", verified.corrupt)
    if verified.unread.objects:
        say(f"{count(verified.unread.objects, 'object')} could not be read")
        print_found("not read", verified.unread)
