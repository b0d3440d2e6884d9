"""`3fs:///mount/path?index=sqlite:///path`: objects in slots of large files.

This follows DeepSeek's use of 3FS: a few large files of fixed-size slots (`files`), accessed in batches
(`transfers`). A SQLite database maps objects to slots (`page_index`). On a mounted 3FS with its client
installed, bytes go through USRBIO, with one ring per thread and direction (`usrbio`). Otherwise the
store uses system calls, and logs the reason at INFO. Processes of one host may share a store.

- `slot_bytes` is the size of a slot, including the 4096 bytes of an object's header. `file_slots` is
  the number of slots per file. The first user sets both; later users with other sizes are refused. An
  object larger than a slot is not stored.
- `files` is the maximum number of files; files are never removed. When all slots are used, the least
  recently used objects are evicted, but never manifests and the markers of writing groups.
- `rings` is the number of threads.
- `trust=group` or `trust=any` accepts a directory that others can write to; otherwise it is refused.
- `read_only=1`: reads do not count as use, a corrupt object is CORRUPT at every read, and every write
  fails.

A write survives the death of the process once it is reported as OK. After a power failure an object may
be missing or corrupt.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

from ...errors import ConfigError, StorageError
from ...page_format.object_name import ObjectName
from ..base import Capabilities, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..buffers import fitting
from ..error_log import ErrorLog
from ..seen_names import SeenNames
from ..threaded_backend import Stop, ThreadCalls, ThreadedBackend
from ..uri import StoreUri
from .files import SlotFiles, made_directory
from .index_calls import IndexCalls
from .index_file import path_of
from .page_index import PageIndex
from .reads import OpenSlots, PlacedRead, SlotReads
from .sizes import ThreeFsOptions, agree_on_sizes
from .transfers import Transfers
from .usrbio import choose_transfers, load_client
from .writes import SlotWrites

LEASE_S: Final = 60.0
"""Seconds for which a write reserves its slots; no write takes that long. After this time, slots
reserved by a dead writer can be used again."""
_JOB_BYTES_MIN: Final = 2 << 20
"""Minimum bytes per job. Smaller jobs would cost time, because each job queries the index."""
_OPEN_TIMEOUT_S: Final = 30.0
_ROOM: Final = (
    "pages are not stored: free space, or use a new directory and a new index with fewer slots (the"
    " store needs files= times file_slots= times slot_bytes=)"
)

_log = logging.getLogger(__name__)


class ThreeFsBackend(ThreadedBackend):
    """A `StorageBackend` in slots of large files.

    `text` is the store's URI without secrets, for the log.
    """

    slots: OpenSlots
    """The slots with their files, index and transfers; None until the store is open."""

    def __init__(
        self,
        root: Path,
        index: PageIndex,
        options: ThreeFsOptions | None = None,
        *,
        lease_s: float = LEASE_S,
        make_transfers: Callable[[Path, int, ErrorLog], Transfers] = choose_transfers,
        text: str = "",
    ) -> None:
        options = options or ThreeFsOptions()
        super().__init__(
            str(root), "lockstep-3fs", threads=options.rings, job_bytes_min=_JOB_BYTES_MIN
        )
        self._root = root
        self._index = index
        self._options = options
        self._lease_s = lease_s
        self.read_only = options.read_only
        self._complaints = ErrorLog(text or f"3fs://{root}", _ROOM)
        self._index_calls = IndexCalls(index)
        self._open_files: SlotFiles | None = None
        self._make_transfers = make_transfers
        self._transfers: Transfers | None = None
        self._text = ""
        self._seen = SeenNames()

    @property
    def capabilities(self) -> Capabilities:
        """Return the optional features; `zero_copy` is False if the USRBIO client is installed."""
        return Capabilities(lists=True, writes=not self.read_only, zero_copy=load_client() is None)

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether the index has an entry; False if the index answers too late."""
        if self._ready() is None:
            return [False] * len(names)

        async def ask(unknown: Sequence[ObjectName]) -> list[bool]:
            entries = await self._slot_reads.look_up(unknown, deadline)
            return [not isinstance(entry, ReadOutcome) for entry in entries]

        return await self._seen.exist(names, ask)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers, and verify them."""
        calls = self._ready()
        if calls is None:
            return [ReadOutcome.FAILED] * len(reads)
        entries = await self._slot_reads.look_up([read.name for read in reads], deadline)
        outcomes = [
            each if isinstance(each, ReadOutcome) else ReadOutcome.FAILED for each in entries
        ]
        found: list[PlacedRead] = []
        places: list[int] = []
        for at, (read, entry) in enumerate(zip(reads, entries, strict=True)):
            if fitting(read.buffers, read.shape.nbytes, writable=True) is None:
                outcomes[at] = ReadOutcome.FAILED
            elif not isinstance(entry, ReadOutcome):
                found.append(PlacedRead(read, entry))
                places.append(at)
        # Check again that the store is open, because it may have been closed during the index lookup.
        if found and self._ready() is not None:
            read_out = await calls.run(
                self._slot_reads.read,
                found,
                weights=[each.read.shape.nbytes for each in found],
                job_weight_min=_JOB_BYTES_MIN,
                late=ReadOutcome.TIMED_OUT,
                deadline=deadline,
            )
            for at, outcome in zip(places, read_out, strict=True):
                outcomes[at] = outcome
        self._seen.note_reads(reads, outcomes)
        return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Write the objects; each appears under its name atomically."""
        closed = self._ready() is None
        if self.read_only:
            self._complaints.log_read_only()
        if closed or self.read_only:
            return [WriteOutcome.FAILED] * len(writes)
        late = WriteOutcome.TIMED_OUT
        # Before the writes, mark the existing objects of the call as used. Otherwise the writes might
        # evict an object before its successor in the chain.
        await self._slot_writes.note_uses(writes, deadline)
        outcomes = await self._run_by_bytes(self._slot_writes.write, writes, late, deadline)
        self._seen.note_writes(writes, outcomes)
        await self._slot_writes.note_uses(writes, deadline)
        return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; return for each name whether the name is free afterwards."""
        if self._ready() is None:
            return [False] * len(names)
        self._seen.discard(names)
        if self.read_only:
            entries = await self._slot_reads.look_up(names, deadline)
            return [entry is ReadOutcome.MISSING for entry in entries]
        return await self._slot_writes.remove(names, deadline)

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects in the store; see `StorageBackend`.

        Yields nothing after `close`. Raises `StorageError` if the store is closed during the listing.
        """
        if self._ready() is None:
            return
        stop = Stop(math.inf)

        async for each in self._list(self._slot_reads.objects(stop), stop):
            yield each

    async def _open_on(self, calls: ThreadCalls, memory: Sequence[memoryview]) -> None:  # noqa: ARG002 - any memory will do.
        """Create the directory, connect to the index, and read or set the slot sizes in the index.

        Raises `ConfigError` if that fails, or the store has other sizes.
        """
        try:
            await calls.once(self._open_blocking, _OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"store {self._root} did not answer within {_OPEN_TIMEOUT_S:g} s; check its "
                f"filesystem and the index {self._index.text}"
            ) from error
        except StorageError as error:
            raise ConfigError(f"store {self._root} cannot be used: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"store directory {self._root} cannot be used: {error.strerror}; give a directory "
                "that this process may create and write"
            ) from error

    def _on_opened(self) -> None:
        _log.info("opened %s", self._text)

    def _open_blocking(self) -> None:
        index = self._index
        with made_directory(self._root, self._options.trust):
            index.open()
        files = self._open_files = SlotFiles(self._root)
        files.open(index)
        settings = agree_on_sizes(self._root, index, self._options)
        complaints = self._complaints
        transfers = self._make_transfers(self._root, settings.slot_bytes, complaints)
        self._transfers = transfers
        files.use(settings, transfers)
        wanted = self._options.files * settings.file_slots
        slots = index.provide(0 if self.read_only else wanted)
        self.slots = OpenSlots(files, self._index_calls, transfers, settings, complaints)
        self._slot_reads = SlotReads(self.slots, read_only=self.read_only)
        self._slot_writes = SlotWrites(
            self.slots, self._slot_reads, slot_count=wanted, lease_s=self._lease_s
        )
        self._text = (
            f"3fs store {self._root} with {slots} slots of {settings.slot_bytes} bytes, index "
            f"{index.text}, {transfers.text}"
        )

    def _give_back(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
        if self._open_files is not None:
            self._open_files.close()
        self._index_calls.close()


def from_uri(uri: StoreUri) -> ThreeFsBackend:
    """Return the backend of a `3fs://` URI."""
    root, options = uri.directory("3fs:///mount/path?index=..."), uri.read(ThreeFsOptions)
    if not options.index:
        raise ConfigError(f"store {uri.text!r} has no index; add ?index=sqlite:///absolute/path")
    return ThreeFsBackend(
        root, PageIndex(path_of(options.index), home=root), options, text=uri.text
    )
