"""`file:///absolute/path?durability=none|data|full&direct=0|1&threads=N&...`: objects as files.

Each object is one file, found by digests of its name (`objects`), written whole under its
final name or not at all (`publish`), verified on every read, and moved out of the way for good
when it is not what its name says (`quarantine`). Several processes may share the directory,
also over a network filesystem, as far as that has exclusive links.

`durability` says what a write has survived when it is OK: `none` (default) the process, `data` and
`full` a power failure, with `full` also for the name. With `direct=1` the page cache is left out:
opening the store is refused where the filesystem cannot do that; and a key whose buffer does not
start at a multiple of 4096 bytes, or whose length is not one, is still read and written through the
page cache, since the kernel offers no other way without a copy. `threads` bounds the I/O at a time.

`quota_gib` (or `quota_bytes`) bounds the room of the files, and `ttl_s` how long an object stays that
nobody uses. Without a quota they may have half of what the filesystem has without them, with 0 all of
it. Each pass finds that half anew, so processes need not agree on a number, and several stores leave
each other room. Each process sweeps, one at a time (`sweeper`); the quota may be overrun by what is
written between two passes. Records, which say what the pages are, are not swept.

With `read_only=1` nothing in the directory is made, moved or removed, and it need not be writable: for
looking at a store. Every write fails then, and what is bad stays where it is.

Whoever can write to the directory can poison the cache: checksums find damage, but they are no
signatures. So files are for their owner alone, a directory that others can write to is refused unless
the URI says `trust=group` or `trust=any`, and no link out of it is followed.
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
from ..complaints import ROOM
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
"""More help with a disk that has to be waited for, and cost where there are no cores for them."""
_JOB_BYTES_MIN: Final = 4 << 20
"""A job moves at least this much. Small pages are mostly Python's own work, which two threads do
more slowly than one; so a batch of them is divided only if it is large."""
_JOB_NAMES_MIN: Final = 8192
"""As for `_JOB_BYTES_MIN`: looking a name up is short, and nearly all of it Python's own work."""
_LONG_LOOK_S: Final = 50e-6
"""A look at a name that takes longer waits for a device or a network. Shorter ones are mostly Python's
own work, and calls that do it side by side take three times as long as one after the other."""
_LOOKS_TOLD: Final = 16
"""As many looks tell how long one lasts."""
_LOOK_TURN_S: Final = 0.01
"""How long a call waits for its turn: whoever has it longer waits for the filesystem."""
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
            raise ConfigError("quota_gib and quota_bytes are one too many")

    @property
    def limits(self) -> SweepLimits:
        """What the store may keep."""
        quota = self.quota_bytes if self.quota_gib is None else ceil(self.quota_gib * (1 << 30))
        return SweepLimits(quota_bytes=quota, ttl_s=self.ttl_s)


class FileBackend(ThreadedBackend):
    """Keeps the contract of `StorageBackend` in a directory.

    Buffers are any contiguous memory; bytes go straight between them and the files. Existence is
    answered from memory for names that this backend has seen. `text` names the store in the log, as
    its URI without secrets does.
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
        """Whether the filesystem has to be waited for, so that several should ask it at a time."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(lists=True, writes=not self.read_only, zero_copy=True)

    async def _open_on(self, calls: ThreadCalls, memory: Sequence[memoryview]) -> None:  # noqa: ARG002 - any memory will do.
        """Make the directory and try a write in it, unless it is `read_only`.

        Raises `ConfigError` if that does not work or, with `direct`, the filesystem refuses.
        """
        try:
            await calls.once(self._open_files, _OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"store directory {self.root} did not answer within {_OPEN_TIMEOUT_S:g} s; "
                "check the filesystem that it is on"
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
        """Say for each name whether there is something under it; False for what is late."""
        if self._ready() is None:
            return [False] * len(names)
        if self._sweeper is not None and self._sweeper.has_removed():
            self._seen = SeenNames()
        return await self._seen.exist(names, lambda unknown: self._ask(unknown, deadline))

    async def _ask(self, names: Sequence[ObjectName], deadline: float) -> list[bool]:
        """Ask the filesystem for names: one call after the other, while that is quicker."""
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
        """Write the objects, each under its name at once and whole."""
        if not writes:
            return []
        late = WriteOutcome.TIMED_OUT
        times = self._files.use_times(writes[0].after)

        def write(some: Sequence[Write], stop: Stop) -> list[WriteOutcome]:
            outcomes = [self._files.write(*each[:3], stop) for each in some]
            told = zip(some, outcomes, strict=True)
            there = [each.name if outcome in _THERE else None for each, outcome in told]
            first = next(at for at, each in enumerate(writes) if each is some[0])
            times.mark(first, there)
            return outcomes

        outcomes = await self._run_by_bytes(write, writes, late, deadline)
        self._seen.note_writes(writes, outcomes)
        if self._sweeper is not None:
            self._note_written(self._sweeper, writes, outcomes)
        return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; True where the name is free afterwards."""
        self._seen.discard(names)
        return await self._run_by_names(self._remove, names, deadline)

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield what is in the store; see `StorageBackend`.

        Nothing after `close`; raises `StorageError` where that comes in between.
        """
        async for each in self._list(self._files.names()):
            yield each

    async def close(self) -> None:
        """Stop what runs and the sweeper, wait for both, and close the directory. Idempotent."""
        swept = self._sweeper.end() if self._sweeper is not None else None
        await super().close()
        if swept is not None:
            # It stops between two files, and holds nothing that anybody needs.
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
