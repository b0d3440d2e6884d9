"""Writing objects several to a file: what the index lacks is put together, stored, and committed.

Writers do not wait for each other. Each stores a file of its own and then asks the index for the
names; who comes second learns what stands, and what is left in its file is taken by the bucket's
lifecycle.
"""

import logging
from collections.abc import Sequence
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HeaderFinding
from ...page_format.object_name import name_digest
from ..base import Write, WriteOutcome
from ..fitting import fitting
from ..page_index.contract import NOTHING, CommitOutcome, Entry
from .calls import each
from .index import StoreIndex
from .objects import read_place
from .pack_files import NewObject, PackFile, cut_packs, objects_in, place_of
from .requests import RequestFailed, S3Requests

_WRITE_TRIES: Final = 8
"""Each try loses only to somebody else who has written the same object."""
_PACKS_AT_A_TIME: Final = 8
"""Each is a copy of what it has."""

_log = logging.getLogger(__name__)


class PackWriter:
    """Writes the objects of one store. See `backend.BucketLayout`."""

    def __init__(
        self, requests: S3Requests, index: StoreIndex, concurrency: int, pages_max: int
    ) -> None:
        self._requests = requests
        self._index = index
        self._concurrency = concurrency
        self._pages_max = pages_max

    async def write(self, writes: Sequence[Write], outcomes: list[WriteOutcome]) -> None:
        """Write the objects that the index lacks, or has with too few columns."""
        waiting: list[int] = []
        fitted: list[Write] = []
        for number, write in enumerate(writes):
            buffers = fitting(write.buffers, write.shape.nbytes)
            fitted.append(Write(write.name, tuple(buffers or ()), write.shape))
            if name_digest(write.name) is None or buffers is None:
                outcomes[number] = WriteOutcome.FAILED
            else:
                waiting.append(number)
        try:
            for _ in range(_WRITE_TRIES):
                if not waiting:
                    return
                news = await self._missing(fitted, waiting, outcomes)
                waiting = await self._store(news, outcomes)
        except StorageError as error:
            _log.debug("%s", error)
        for number in waiting:
            outcomes[number] = WriteOutcome.FAILED

    async def _missing(
        self, writes: Sequence[Write], numbers: Sequence[int], outcomes: list[WriteOutcome]
    ) -> list[NewObject]:
        """Return what is to be stored of these writes; the others have their outcomes.

        Their buffers are views of bytes.
        """
        digests = [name_digest(writes[number].name) or b"" for number in numbers]
        entries = await self._index.look_up(digests)
        news: list[NewObject] = []
        for number, digest, entry in zip(numbers, digests, entries, strict=True):
            write = writes[number]
            new = NewObject(number, write.name, digest, write.buffers, write.shape, NOTHING)
            if entry is None:
                news.append(new)
            elif not _is_object(entry, write):
                news.append(new.replacing(entry.generation))
            elif write.shape.lacks(entry.present):
                news.append(await self._beside(entry, new))
            else:
                outcomes[number] = WriteOutcome.PRESENT
        return news

    async def _beside(self, entry: Entry, new: NewObject) -> NewObject:
        """Return `new` with the columns that the object of `entry` has beside it, if it is sound."""
        new = new.replacing(entry.generation)
        if not entry.present & ~new.shape.present:
            return new
        whole = new.shape.of_columns(entry.present)
        room = memoryview(bytearray(whole.nbytes))
        finding, _ = await read_place(self._requests, place_of(entry), new.digest, [room], whole)
        return new.united(room, entry.present) if finding is HeaderFinding.SOUND else new

    async def _store(self, news: Sequence[NewObject], outcomes: list[WriteOutcome]) -> list[int]:
        """Store objects in as few files as may be; return the numbers of those to try again."""
        packs = cut_packs(news, self._pages_max)
        again: list[int] = []

        async def one(number: int) -> None:
            pack = packs[number]
            try:
                results = await self._store_pack(pack)
            except StorageError as error:
                _log.debug("%s", error)
                for new in pack:
                    outcomes[new.number] = WriteOutcome.FAILED
                return
            for new, result in zip(pack, results, strict=True):
                if result is CommitOutcome.DONE:
                    outcomes[new.number] = WriteOutcome.OK
                else:
                    again.append(new.number)

        await each(one, len(packs), min(_PACKS_AT_A_TIME, self._concurrency))
        return sorted(again)

    async def _store_pack(self, news: Sequence[NewObject]) -> list[CommitOutcome]:
        """Store one file, and commit what is in it. Raises `StorageError`."""
        file = PackFile.of(news)
        if await self._requests.create(file.path, file.content) is None:
            raise StorageError(f"{file.path} is there already")
        wishes = [(file.entry(at), new.replaces) for at, new in enumerate(news)]
        results = await self._index.commit(wishes)
        if CommitOutcome.DONE not in results:
            # All of them were written by somebody else meanwhile.
            try:
                await self._requests.delete(file.path)
            except RequestFailed as error:
                _log.debug("%s", error)
        return results


def _is_object(entry: Entry, write: Write) -> bool:
    """Say whether an entry may be that of an object of the kind that is to be written."""
    shape = write.shape
    return (
        objects_in(entry.place) > 0
        and shape.knows(entry.present)
        and shape.payload_bytes(entry.present) == entry.length
    )
