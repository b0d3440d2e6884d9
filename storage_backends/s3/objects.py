"""The layout of a bucket, with one S3 object per page or record, and its reads and writes.

    <prefix>/objects/<namespace digest>/<2 digits>/<name digest>

An S3 object is created only if its path is free, and replaced only if it is still the version that the
writer has read. So writers need no lock. A corrupt object is removed, because a quarantine in a bucket
would cost money and is unlikely to be inspected.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from ...page_format.object_header import (
    HEADER_BYTES,
    HeaderFinding,
    check_header,
    encode_object,
    presence_bits,
    read_statement,
)
from ...page_format.object_name import OBJECTS, ObjectName, name_digest, object_path
from ...page_format.object_shape import ObjectShape
from ..base import Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..buffers import fitting
from ..error_log import LoggedError
from .ranges import Elsewhere, Range, copy_object, join_ranges, wanted_ranges
from .requests import Changed, Listed, RequestFailed, S3Requests

_GOOD: Final = (HeaderFinding.SOUND, HeaderFinding.LACKING)
_READ_TRIES: Final = 6
"""Maximum attempts of one read. At most three fail because of unexpected columns or corrupt bytes;
others fail only if the object was replaced meanwhile."""
_WRITE_TRIES: Final = 8

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class _Standing(NamedTuple):
    """An object that exists under a name to be written: its header's contents and its version."""

    finding: HeaderFinding
    """The result of comparing the existing object's header with the shape to be written."""
    present: int
    e_tag: str | None


class S3Objects:
    """Reads, writes and lists the objects of one store. A failure of one key never raises.

    Each result is put into the caller's list as soon as it arrives. So if the call times out, the
    results that arrived before the deadline are kept.
    """

    def __init__(self, requests: S3Requests, concurrency: int, *, read_only: bool = False) -> None:
        self._requests = requests
        self._concurrency = concurrency
        self._read_only = read_only
        self._found, self._failures = LoggedError(_log), LoggedError(_log)

    async def look_up(self, names: Sequence[ObjectName], found: list[bool]) -> None:
        """Store in `found`, for each name, whether its object exists."""

        async def one(number: int) -> bool:
            path = path_of(names[number])
            return path is not None and await self._requests.size(path) is not None

        await self._fill_in(found, one, failed=False)

    async def read(self, reads: Sequence[Read], outcomes: list[ReadOutcome]) -> None:
        """Read the objects into their buffers and verify them.

        A corrupt object is removed, unless the store is `read_only`.
        """
        await self._fill_in(outcomes, lambda at: self._read(reads[at]), failed=ReadOutcome.FAILED)

    async def write(
        self, writes: Sequence[Write], outcomes: list[WriteOutcome], seen: Sequence[bool]
    ) -> None:
        """Write the objects that do not exist; `seen` states per object whether it probably exists.

        If the existing object lacks a column of the new one, it is replaced by an object with the
        columns of both.
        """
        await self._fill_in(
            outcomes,
            lambda at: self._write(writes[at], likely=seen[at]),
            failed=WriteOutcome.FAILED,
        )

    async def remove(self, names: Sequence[ObjectName], removed: list[bool]) -> None:
        """Remove the objects, unless the store is `read_only`.

        Stores in `removed`, for each name, whether no object exists under that name afterwards. Stores
        False if the name is invalid or a request fails.
        """

        async def one(number: int) -> bool:
            path = path_of(names[number])
            if path is None:
                return False
            if self._read_only:
                return await self._requests.size(path) is None
            await self._requests.delete(path)
            return True

        await self._fill_in(removed, one, failed=False)

    async def _fill_in(
        self, results: list[Result], work: Callable[[int], Awaitable[Result]], *, failed: Result
    ) -> None:
        """Store the result of `work(number)` in `results[number]`, or `failed` if a request fails."""

        async def one(number: int) -> None:
            try:
                results[number] = await work(number)
            except RequestFailed as error:
                self._failures.warn("a request to an s3:// store has failed: %s", error)
                results[number] = failed

        await _each(one, len(results), self._concurrency)

    async def listing(self) -> AsyncIterator[list[StoredObject]]:
        """Yield the stored objects with a valid header.

        Raises `RequestFailed`, even if only one header cannot be read, so that an incomplete listing is
        never taken for a complete one.
        """
        async for some in self._requests.listing(OBJECTS):
            yield await self._describe_all(some)

    async def _describe_all(self, some: Sequence[Listed]) -> list[StoredObject]:
        """Return the pages and records in these S3 objects, without those with invalid headers.

        Raises the first `RequestFailed`.
        """
        found: list[StoredObject | RequestFailed | None] = [None] * len(some)

        async def one(number: int) -> None:
            # Return failures as values, because the task group would wrap an exception. The first
            # failure is raised after all tasks have ended.
            try:
                found[number] = await self._describe(some[number])
            except RequestFailed as error:
                found[number] = error

        await _each(one, len(some), self._concurrency)
        for stored in found:
            if isinstance(stored, RequestFailed):
                raise stored
        return [stored for stored in found if isinstance(stored, StoredObject)]

    async def _describe(self, listed: Listed) -> StoredObject | None:
        """Return the object that an S3 object's header describes.

        Returns None if the S3 object does not exist any more, or if its header is invalid in two reads.
        """
        if listed.size < HEADER_BYTES:
            return None
        for _ in range(2):
            fetched = await self._requests.fetch(listed.path, [Range(0, HEADER_BYTES)])
            if fetched is None:
                return None
            header = fetched.cut(0, HEADER_BYTES)
            statement = HeaderFinding.SHORT if header is None else read_statement(header)
            if (
                isinstance(statement, HeaderFinding)
                or listed.size != HEADER_BYTES + statement.shape.nbytes
            ):
                continue
            age_s = max(0.0, time.time() - listed.written.timestamp())
            return StoredObject(name=statement.name, shape=statement.shape, age_s=age_s)
        return None

    async def _read(self, read: Read) -> ReadOutcome:
        digest = name_digest(read.name)
        buffers = fitting(read.buffers, read.shape.nbytes, writable=True)
        if digest is None or buffers is None:
            return ReadOutcome.FAILED
        path = object_path(read.name.namespace, digest)
        finding, e_tag = await self._fill(path, digest, buffers, read.shape)
        match finding:
            case None:
                return ReadOutcome.MISSING
            case HeaderFinding.SOUND:
                return ReadOutcome.OK
            case HeaderFinding.LACKING:
                return ReadOutcome.LACKING
            case _ if not self._read_only:
                await self._drop(path, e_tag, finding)
            case _:
                self._found.warn("object %s is corrupt (%s)", path, finding.name)
        return ReadOutcome.CORRUPT

    async def _fill(
        self, path: str, digest: bytes, buffers: Sequence[memoryview], shape: ObjectShape
    ) -> tuple[HeaderFinding | None, str | None]:
        """Fill `buffers` with the parts of `shape` of the object at `path`, and verify them.

        Returns (finding, version that was read); the finding is None if there is no object. A corrupt
        object is read twice, because bits may also flip in transit. Raises `RequestFailed`.
        """
        # First request the ranges for an object with exactly the reader's columns, because most objects
        # have those.
        present = shape.present
        was_bad = False
        for _ in range(_READ_TRIES):
            ranges = join_ranges(wanted_ranges(shape, present))
            try:
                fetched = await self._requests.fetch(path, ranges)
            except Changed:
                await asyncio.sleep(0)
                continue
            if fetched is None:
                return None, None
            finding = copy_object(fetched, digest, buffers, shape)
            if isinstance(finding, Elsewhere):
                present = finding.present
            elif finding in _GOOD or was_bad:
                return finding, fetched.e_tag
            else:
                was_bad, present = True, shape.present
        raise RequestFailed(f"GET {path}: the object was replaced during every attempt")

    async def _drop(self, path: str, e_tag: str | None, finding: HeaderFinding) -> None:
        """Remove a corrupt object if it is still the version that was found corrupt.

        The client has no conditional removal. So a valid object that replaces the corrupt one between
        the check and the removal may be removed too, which causes a miss.
        """
        try:
            standing = await self._requests.size(path)
            if standing is None or standing[1] != e_tag:
                return
            await self._requests.delete(path)
        except RequestFailed as error:
            self._found.warn(
                "object %s is corrupt (%s) but cannot be removed: %s", path, finding.name, error
            )
        else:
            self._found.warn("object %s was corrupt (%s) and has been removed", path, finding.name)

    async def _write(self, write: Write, *, likely: bool) -> WriteOutcome:
        digest = name_digest(write.name)
        buffers = fitting(write.buffers, write.shape.nbytes)
        if digest is None or buffers is None:
            return WriteOutcome.FAILED
        path = object_path(write.name.namespace, digest)
        content: bytes | None = None
        # Read the header first if the object probably exists, because that is cheaper than sending the
        # whole object.
        if not likely:
            content = _encode(write.name, digest, buffers, write.shape)
            if await self._requests.create(path, content) is not None:
                return WriteOutcome.OK
        for _ in range(_WRITE_TRIES):
            standing = await self._look(path, digest, write.shape)
            if standing is not None and standing.finding not in _GOOD:
                # Read an invalid header again, because bits may flip in transit.
                standing = await self._look(path, digest, write.shape)
            if standing is None:
                content = content or _encode(write.name, digest, buffers, write.shape)
                if await self._requests.create(path, content) is not None:
                    return WriteOutcome.OK
            elif standing.finding is HeaderFinding.SOUND:
                return WriteOutcome.PRESENT
            else:
                fuller = await self._beside(standing, write, path, digest, buffers)
                if await self._requests.replace(path, fuller, standing.e_tag):
                    return WriteOutcome.OK
        return WriteOutcome.FAILED

    async def _look(self, path: str, digest: bytes, shape: ObjectShape) -> _Standing | None:
        fetched = await self._requests.fetch(path, [Range(0, HEADER_BYTES)])
        if fetched is None:
            return None
        header = fetched.cut(0, HEADER_BYTES) or memoryview(b"")
        finding = check_header(header, digest, shape)
        if finding in _GOOD:
            present = presence_bits(header)
            if fetched.size == HEADER_BYTES + shape.payload_bytes(present):
                return _Standing(finding, present, fetched.e_tag)
            finding = HeaderFinding.LENGTH
        return _Standing(finding, 0, fetched.e_tag)

    async def _beside(
        self,
        standing: _Standing,
        write: Write,
        path: str,
        digest: bytes,
        buffers: Sequence[memoryview],
    ) -> bytes:
        """Return the replacement of `standing`: the new object plus other columns of the old one.

        Old columns are left out if they are corrupt or the old object was replaced meanwhile. In the
        latter case the server also refuses the replacement, because the old object's version has
        changed.
        """
        present = standing.present
        if present & ~write.shape.present:
            whole = write.shape.of_columns(present)
            room = memoryview(bytearray(whole.nbytes))
            finding, e_tag = await self._fill(path, digest, [room], whole)
            if finding is HeaderFinding.SOUND and e_tag == standing.e_tag:
                united = write.shape.unite(buffers, room, present)
                shape = write.shape.with_columns(present)
                return _encode(write.name, digest, [united], shape)
        return _encode(write.name, digest, buffers, write.shape)


def _encode(
    name: ObjectName, digest: bytes, buffers: Sequence[memoryview], shape: ObjectShape
) -> bytes:
    """Return a copy of a whole object, which the client may send even after the call has returned."""
    return b"".join([encode_object(name, digest, buffers, shape), *buffers])


def path_of(name: ObjectName) -> str | None:
    """Return the path of an object in the bucket, or None if its name is invalid."""
    digest = name_digest(name)
    return None if digest is None else object_path(name.namespace, digest)


async def _each(work: Callable[[int], Awaitable[None]], count: int, concurrency: int) -> None:
    """Await `work(number)` for all numbers below `count`, at most `concurrency` at a time.

    Raises only for bugs.
    """
    numbers = iter(range(count))

    async def run_queue() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(count, concurrency)):
            group.create_task(run_queue())
