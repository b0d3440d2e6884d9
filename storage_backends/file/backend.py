"""`file:///absolute/path?durability=none|data|full&direct=0|1&threads=N&...`: one file per object.

File paths are derived from digests of object names (`objects`). A file appears under its final name
atomically (`publish`). Every read verifies its file, and moves a corrupt file to the quarantine
directory (`quarantine`). Several processes may share the store's directory. They may do so on a network
filesystem only if its `link` fails when the name exists.

- `durability` states the failures that a write survives once it is reported as OK. `none` (default):
  the death of the process. `data`: also a power failure, but the file's directory entry may be lost.
  `full`: a power failure, directory entry included.
- `direct=1` bypasses the kernel's page cache; opening fails if the filesystem cannot do that. Buffers
  whose address or length is not a multiple of 4096 bytes still use the page cache, because bypassing it
  would need a copy.
- `threads` is the maximum number of I/O threads.
- `quota_gib` (or `quota_bytes`) limits the disk space. The default is half of the disk space that the
  store uses or could use, recomputed by each sweep; 0 means no limit. Writes between two sweeps may
  exceed the quota.
- `ttl_s` is the time after which an unused object is removed.
- `read_only=1` means that nothing in the directory is created, moved or removed, and every write fails.
- `trust=group` or `trust=any` accepts a directory that others can write to; otherwise it is refused.

The processes take turns to sweep the directory, that is, to remove expired and excess files
(`sweeper`). Records (manifests and markers of writing groups) are never swept.

Anyone who can write to the directory can forge objects, because checksums are not signatures. So by
default only the owner can access the files. Links out of the directory are not followed.
"""

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

from msgspec import Meta

from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ..base import Capabilities, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..error_log import ROOM
from ..seen_names import SeenNames
from ..threaded_backend import CLOSE_TIMEOUT_S, Stop, ThreadCalls, ThreadedBackend
from ..uri import StoreUri
from .contents import file_bytes
from .objects import Durability, ObjectFiles
from .read_only import ReadOnlyFiles
from .sweep import QUOTA_BYTES_MAX, SweepLimits
from .sweeper import Sweeper
from .trust import Trust

THREADS: Final = max(2, min(4, os.cpu_count() or 1))
"""Default number of I/O threads. More threads help with a slow disk, but make calls slower if no cores
are idle."""
_JOB_BYTES_MIN: Final = 4 << 20
"""Minimum bytes per job. Only large calls are divided among threads. Small objects cost mostly
interpreter work, and two threads do interpreter work more slowly than one."""
_JOB_NAMES_MIN: Final = 8192
"""Minimum names per job. Looking up a name is mostly interpreter work, which two threads do more slowly
than one."""
_LONG_LOOK_S: Final = 50e-6
"""Limit for the average seconds per look-up. Slower look-ups are assumed to wait for a device or
network, so calls run them concurrently. Faster look-ups are mostly interpreter work, and concurrent
calls would make them three times as slow."""
_LOOKS_TOLD: Final = 16
"""Minimum number of look-ups in a job for its average duration per look-up to count. The average
decides whether later calls run concurrently."""
_LOOK_TURN_S: Final = 0.01
"""Maximum seconds that a look-up call waits for an earlier one to end. After a longer wait, look-ups
are assumed to wait for the filesystem, so calls run them concurrently."""
_OPEN_TIMEOUT_S: Final = 30.0
_NO_LIMITS: Final = SweepLimits(quota_bytes=0)
_THERE: Final = (WriteOutcome.OK, WriteOutcome.PRESENT)


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FileOptions(SweepLimits):
    """The options of a `file://` URI."""

    durability: Durability = Durability.NONE
    direct: bool = False
    threads: Annotated[int, Meta(ge=1, le=256)] = THREADS
    quota_gib: Annotated[float, Meta(ge=0, le=QUOTA_BYTES_MAX >> 30)] | None = None
    trust: Trust = Trust.OWNER
    read_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quota_gib is not None and self.quota_bytes is not None:
            raise ConfigError("quota_gib and quota_bytes are both given; give only one of them")

    @property
    def limits(self) -> SweepLimits:
        """Return the quota and the time to live that the options set."""
        quota = self.quota_bytes if self.quota_gib is None else ceil(self.quota_gib * (1 << 30))
        return SweepLimits(quota_bytes=quota, ttl_s=self.ttl_s)


class FileBackend(ThreadedBackend):
    """A `StorageBackend` in a directory.

    Bytes are transferred directly between any contiguous buffers and the files. `exists` answers from
    memory for names that this backend has seen. `text` is the store's URI without secrets, for the log.
    """

    def __init__(self, root: Path, options: FileOptions | None = None, *, text: str = "") -> None:
        options = options or FileOptions()
        super().__init__(
            str(root),
            "lockstep-file",
            threads=options.threads,
            job_bytes_min=_JOB_BYTES_MIN,
            job_names_min=_JOB_NAMES_MIN,
        )
        self.root = root
        self._direct = options.direct
        self.read_only = options.read_only
        trust = options.trust
        self._files = (
            ReadOnlyFiles(root, trust=trust, text=text)
            if options.read_only
            else ObjectFiles(
                root, options.durability, direct=options.direct, trust=trust, text=text
            )
        )
        self._limits = options.limits
        self._text = text or f"file://{root}"
        self._sweeper: Sweeper | None = None
        self._seen = SeenNames()
        self._looking = asyncio.Lock()
        self._looks_last = False
        """Whether look-ups mostly wait for the filesystem, so that calls should run them concurrently.
        """

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(lists=True, writes=not self.read_only, zero_copy=True)

    async def _open_on(self, calls: ThreadCalls, memory: Sequence[memoryview]) -> None:  # noqa: ARG002 - any memory will do.
        """Create the directory and try a write in it, unless the store is `read_only`.

        Raises `ConfigError` if that fails, or if `direct` is set and the filesystem refuses O_DIRECT.
        """
        try:
            await calls.once(self._open_files, _OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"store directory {self.root} did not answer within {_OPEN_TIMEOUT_S:g} s; "
                "check its filesystem"
            ) from error
        except OSError as error:
            what = "create and write"
            if self.read_only:
                what = "read"
            elif self._direct:
                what += ", and direct=1 needs a filesystem with O_DIRECT"
            remedy = f"give a directory that this process may {what}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = ROOM
            elif error.errno == errno.EROFS:
                remedy = "mount its filesystem for writing, or open the store with read_only=1"
            raise ConfigError(
                f"store directory {self.root} cannot be used: {error.strerror}; {remedy}"
            ) from error

    def _open_files(self) -> None:
        self._files.open()
        if not self.read_only:
            _log.info("store %s may hold %s", self._text, self._limits.in_words(self.root))

    def _on_opened(self) -> None:
        if self._limits != _NO_LIMITS and not self.read_only:
            self._sweeper = self._files.sweeper(self._limits)
            self._sweeper.start()

    def _give_back(self) -> None:
        self._files.close()

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether a file exists under it; False if the look-up timed out."""
        if self._ready() is None:
            return [False] * len(names)
        if self._sweeper is not None and self._sweeper.has_removed():
            self._seen = SeenNames()
        return await self._seen.exist(names, lambda unknown: self._ask(unknown, deadline))

    async def _ask(self, names: Sequence[ObjectName], deadline: float) -> list[bool]:
        """Look up names in the filesystem, one call at a time unless look-ups are slow."""
        has_turn = False
        if not self._looks_last:
            try:
                async with asyncio.timeout(_LOOK_TURN_S):
                    has_turn = await self._looking.acquire()
            except TimeoutError:
                self._looks_last = True
        try:
            return await self._run_by_names(self._look_up, names, deadline)
        finally:
            if has_turn:
                self._looking.release()

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers, and verify them."""
        late = ReadOutcome.TIMED_OUT
        outcomes = await self._run_by_bytes(self._files.read_all, reads, late, deadline)
        self._seen.note_reads(reads, outcomes)
        if self._sweeper is not None:
            self._sweeper.used(
                read.name
                for read, each in zip(reads, outcomes, strict=True)
                if each is ReadOutcome.OK
            )
        return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Write the objects; each appears under its name atomically."""
        if not writes:
            return []
        late = WriteOutcome.TIMED_OUT
        times = self._files.use_times(writes[0].after)

        def write(some: Sequence[Write], stop: Stop) -> list[WriteOutcome]:
            outcomes = [self._files.write(*each[:3], stop) for each in some]
            pairs = zip(some, outcomes, strict=True)
            there = [each.name if outcome in _THERE else None for each, outcome in pairs]
            first = next(at for at, each in enumerate(writes) if each is some[0])
            times.mark(first, there)
            return outcomes

        outcomes = await self._run_by_bytes(write, writes, late, deadline)
        self._seen.note_writes(writes, outcomes)
        if self._sweeper is not None:
            self._note_written(self._sweeper, writes, outcomes)
        return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; return for each name whether the name is free afterwards."""
        self._seen.discard(names)
        return await self._run_by_names(self._remove, names, deadline)

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects in the store; see `StorageBackend`.

        Yields nothing after `close`. Raises `StorageError` if the store is closed during the listing.
        """
        async for each in self._list(self._files.names()):
            yield each

    async def close(self) -> None:
        """Stop running calls and the sweeper, wait for both, and close the directory. Idempotent."""
        swept = self._sweeper.end() if self._sweeper is not None else None
        await super().close()
        if swept is not None:
            # If the wait times out, leave the sweeper's thread running: it stops at the next file and
            # blocks no other thread.
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(swept), CLOSE_TIMEOUT_S)

    def _note_written(
        self, sweeper: Sweeper, writes: Sequence[Write], outcomes: Sequence[WriteOutcome]
    ) -> None:
        each = list(zip(writes, outcomes, strict=True))
        sweeper.marked(write.name for write, one in each if one in _THERE)
        sweeper.wrote(sum(file_bytes(write.shape) for write, one in each if one is WriteOutcome.OK))

    def _look_up(self, names: Sequence[ObjectName], stop: Stop) -> list[bool]:
        began = monotonic()
        found = [self._files.exists(name) for name in names if not stop.due()]
        if len(found) >= _LOOKS_TOLD:
            self._looks_last = monotonic() - began > _LONG_LOOK_S * len(found)
        return found + [False] * (len(names) - len(found))

    def _remove(self, names: Sequence[ObjectName], stop: Stop) -> list[bool]:
        return [not stop.due() and self._files.remove(name, stop) for name in names]


def from_uri(uri: StoreUri) -> FileBackend:
    """Return the backend of a `file://` URI."""
    root = uri.directory("file:///absolute/path")
    return FileBackend(root, uri.read(FileOptions), text=uri.text)
