"""Several objects in one stored file: the layout of `s3://` with an index.

    <prefix>/packs/<2 digits>/<random name>-<number of objects>

A request costs money and a round trip whatever it moves, so small pages are better put together: the
new pages of one call, of one pool and shard, go into files of up to so many (`pack_files`). Where
an object lies in which file is told by a page index, a database that all users of the store share. A
file is stored first and its objects are committed to the index then, so nobody sees a part of them.

A file never changes, and this module never removes one that holds several objects: the bucket's
lifecycle does that, and also takes those of writers that died before they committed. A row of the
index whose file is gone is a miss, and goes when somebody meets it.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES, HeaderFinding, read_statement
from ...page_format.object_name import ObjectName, name_digest
from ...page_format.object_shape import ObjectShape
from ..base import Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..fitting import fitting
from ..page_index.contract import Entry, PageIndex, Used
from .address import S3Address
from .calls import each
from .index import StoreIndex
from .objects import GOOD, describe_all, read_place
from .pack_files import cut_reads, objects_in, place_of
from .pack_writes import PackWriter
from .ranges import Range, StoredPlace, copy_object, join_ranges, wanted_ranges
from .requests import Changed, RequestFailed, S3Requests

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """A read whose object the index knows."""

    number: int
    shape: ObjectShape
    buffers: Sequence[memoryview]
    digest: bytes
    entry: Entry

    @property
    def place(self) -> StoredPlace:
        return place_of(self.entry)

    def ranges(self) -> list[Range]:
        """Return what is wanted of the file, as far as the index is right about the columns."""
        shape, present, start = self.shape, self.entry.present, self.entry.offset
        if not shape.knows(present):
            present = shape.present
        wanted = wanted_ranges(shape, present, start)
        # Of an object that lacks a column only the header is looked at.
        return wanted[:1] if shape.lacks(present) else wanted


class S3Packs:
    """The objects of one store, several to a file. See `backend.BucketLayout`."""

    def __init__(
        self, requests: S3Requests, address: S3Address, index: PageIndex, pages_max: int
    ) -> None:
        self._requests = requests
        self._concurrency = address.concurrency
        self._read_only = address.read_only
        self.index = StoreIndex(index, str(address), read_only=address.read_only)
        self._writer = PackWriter(requests, self.index, address.concurrency, pages_max)

    async def open(self) -> None:
        """Open the index. Raises `ConfigError`."""
        await self.index.open()

    async def look_up(self, names: Sequence[ObjectName], found: list[bool]) -> None:
        """Say for each name whether the index has it; the bucket is not asked."""
        digests = {
            number: digest
            for number, name in enumerate(names)
            if (digest := name_digest(name)) is not None
        }
        try:
            entries = await self.index.look_up(list(digests.values()))
        except StorageError as error:
            _log.debug("%s", error)
            return
        for number, entry in zip(digests, entries, strict=True):
            found[number] = entry is not None

    async def read(self, reads: Sequence[Read], outcomes: list[ReadOutcome]) -> None:
        """Read the objects; those that lie close together in a file by one request."""
        wrong: list[Entry] = []
        try:
            known = await self._find(reads, outcomes, wrong)
            groups = cut_reads([(each_known.entry, each_known.ranges()) for each_known in known])

            async def one(number: int) -> None:
                group = [known[at] for at in groups[number]]
                try:
                    await self._read_group(group, outcomes, wrong)
                except RequestFailed as error:
                    _log.debug("%s", error)
                    for failed in group:
                        outcomes[failed.number] = ReadOutcome.FAILED

            await each(one, len(groups), self._concurrency)
            if wrong and not self._read_only:
                # The file stays: perhaps it is only the row that is wrong.
                await self.index.drop(wrong)
        except StorageError as error:
            _log.debug("%s", error)

    async def write(
        self,
        writes: Sequence[Write],
        outcomes: list[WriteOutcome],
        seen: Sequence[bool],  # noqa: ARG002 - the index is asked for all.
    ) -> None:
        """Write the objects that the index lacks, or has with too few columns."""
        await self._writer.write(writes, outcomes)

    async def remove(self, names: Sequence[ObjectName], removed: list[bool]) -> None:
        """Take the objects out of the index, and with the last object of a file the file.

        Neither if the store is `read_only`: then this only says which names are free.
        """
        digests = {
            number: digest
            for number, name in enumerate(names)
            if (digest := name_digest(name)) is not None
        }
        try:
            if self._read_only:
                standing = await self.index.look_up(list(digests.values()))
                for number, entry in zip(digests, standing, strict=True):
                    removed[number] = entry is None
                return
            entries = await self.index.remove(list(digests.values()))
        except StorageError as error:
            _log.debug("%s", error)
            return
        for number in digests:
            removed[number] = True
        await self._delete_lonely(entries)

    async def listing(self) -> AsyncIterator[list[StoredObject]]:
        """Yield what the index has, as far as its header is sound.

        Raises `StorageError`, also where one header cannot be read.
        """
        async for some in self.index.entries():
            yield await describe_all(self._describe, some, self._concurrency)

    async def close(self) -> None:
        """Close the index. Idempotent."""
        await self.index.close()

    async def _find(
        self, reads: Sequence[Read], outcomes: list[ReadOutcome], wrong: list[Entry]
    ) -> list[_Known]:
        """Return the reads whose objects the index knows; the others have their outcomes."""
        digests: dict[int, bytes] = {}
        buffers: dict[int, Sequence[memoryview]] = {}
        for number, read in enumerate(reads):
            digest = name_digest(read.name)
            views = fitting(read.buffers, read.shape.nbytes, writable=True)
            if digest is None or views is None:
                outcomes[number] = ReadOutcome.FAILED
            else:
                digests[number], buffers[number] = digest, views
        try:
            entries = await self.index.look_up(list(digests.values()))
        except StorageError:
            for number in digests:
                outcomes[number] = ReadOutcome.FAILED
            raise
        known: list[_Known] = []
        for (number, digest), entry in zip(digests.items(), entries, strict=True):
            if entry is None:
                outcomes[number] = ReadOutcome.MISSING
            elif not objects_in(entry.place):
                wrong.append(entry)
                outcomes[number] = ReadOutcome.CORRUPT
            else:
                shape = reads[number].shape
                known.append(_Known(number, shape, buffers[number], digest, entry))
        return known

    async def _read_group(
        self, group: Sequence[_Known], outcomes: list[ReadOutcome], wrong: list[Entry]
    ) -> None:
        """Read objects of one file that lie close together."""
        ranges = join_ranges(part for known in group for part in known.ranges())
        try:
            fetched = await self._requests.fetch(group[0].entry.place, ranges)
        except Changed as error:
            raise RequestFailed(str(error)) from error
        for known in group:
            finding: HeaderFinding | None = None
            if fetched is not None:
                where = (known.place, known.digest, known.buffers, known.shape)
                copied = copy_object(fetched, *where)
                if isinstance(copied, HeaderFinding) and copied in GOOD:
                    finding = copied
                else:
                    finding, _ = await read_place(self._requests, *where)
            match finding:
                case None:
                    wrong.append(known.entry)
                    outcomes[known.number] = ReadOutcome.MISSING
                case HeaderFinding.SOUND:
                    outcomes[known.number] = ReadOutcome.OK
                case HeaderFinding.LACKING:
                    outcomes[known.number] = ReadOutcome.LACKING
                case _:
                    _log.warning("an object in %s is bad (%s)", known.entry.place, finding.name)
                    wrong.append(known.entry)
                    outcomes[known.number] = ReadOutcome.CORRUPT

    async def _delete_lonely(self, entries: Sequence[Entry]) -> None:
        """Remove files that held nothing but these objects; others are left to the lifecycle."""
        paths = [entry.place for entry in entries if objects_in(entry.place) == 1]

        async def one(number: int) -> None:
            try:
                await self._requests.delete(paths[number])
            except RequestFailed as error:
                _log.debug("%s", error)

        await each(one, len(paths), self._concurrency)

    async def _describe(self, used: Used) -> StoredObject | None:
        """Return what an object says of itself; None if it is gone, or twice not sound."""
        entry = used.entry
        end = entry.offset + HEADER_BYTES
        if not objects_in(entry.place):
            return None
        for _ in range(2):
            fetched = await self._requests.fetch(entry.place, [Range(entry.offset, end)])
            if fetched is None or fetched.size < end + entry.length:
                return None
            header = fetched.cut(entry.offset, end)
            said = HeaderFinding.SHORT if header is None else read_statement(header)
            if isinstance(said, HeaderFinding) or name_digest(said.name) != entry.key:
                continue
            if said.shape.nbytes == entry.length:
                return StoredObject(name=said.name, shape=said.shape, age_s=used.age_s)
        return None
