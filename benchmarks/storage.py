"""Throughput of a store compared with bare system calls on the same bytes, in the same run.

Each round writes pages under new names, reads them back and removes them. Right before, bare calls
write and read one large file (`bare_calls`), with as many threads and the same memory. The reported
figure is the ratio of the medians, which hardly depends on other load on the machine. If the store is
not in a directory, the large file is in memory.
"""

import asyncio
import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Protocol, TypedDict, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from ..errors import ConfigError, StorageError
from ..page_format.object_name import NAME_DIGEST_BYTES, ObjectName, object_path
from ..page_format.object_shape import PART_BYTES_MAX, ObjectShape
from ..storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ..storage_backends.registry import make_backend
from ..storage_backends.uri import StoreUri, parse_uri
from .bare_calls import BareCalls, pages_in_memory, require_memory_twice
from .byte_sizes import BYTES

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)
Outcome = TypeVar("Outcome")

ROUNDS: Final = 5
BATCH_PAGES: Final = 1024
BATCH_BYTES: Final = 16 << 20
"""Maximum number of pages, and maximum number of bytes, of one storage call. A page that exceeds the
maximum gets a call of its own."""
EXISTS_NAMES: Final = 1000
_SMALL_BYTES: Final = 4096
_DEADLINE_S: Final = 300.0
IN_DIRECTORIES: Final = ("file", "3fs")
"""The URI schemes of stores that keep their pages in files."""
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - nothing is opened there by a name.


class StorageReport(TypedDict):
    """The report of `lockstep bench storage`. GB are 10^9 bytes of KV pages."""

    store: str
    page_bytes: int
    threads: int
    bytes: int
    """The total size of the pages, each of which is written and read once per round."""
    rounds: int
    read_gbps: float
    write_gbps: float
    exists_us_per_key: float
    """Microseconds per name to look up `EXISTS_NAMES` names, all of which the store has."""
    limit_read_gbps: float
    limit_write_gbps: float
    ratio_read: float
    ratio_write: float
    cpu_s_per_gb: float
    """The CPU seconds of this process per GB that the store reads and writes, in the median round."""
    limit_cpu_s_per_gb: float
    limit_file: str
    """A description of the file that the bare calls read and wrote."""
    load: float
    """The machine's one-minute load average before the measurement."""
    python: str
    machine: str
    cpus: int


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSizes:
    """The options of `lockstep bench storage`."""

    store: Annotated[str, Parameter(metavar="URI")]
    """The store, as a URI; the benchmark removes what it writes."""
    page_bytes: Annotated[int, BYTES, Parameter(validator=Number(gte=1, lte=PART_BYTES_MAX))]
    """Bytes per KV page, such as 65536 or 1MiB."""
    threads: Annotated[int, Parameter(validator=Number(gte=1, lte=256))] = 1
    """The number of threads of the store, and of the bare calls that it is compared with."""
    total_bytes: Annotated[
        int, BYTES, Parameter("--bytes", validator=Number(lte=1 << 50), show_default="256MiB")
    ] = 256 << 20
    """Total bytes of KV pages in a round."""

    def __post_init__(self) -> None:
        if self.total_bytes < self.page_bytes:
            raise ConfigError(f"--bytes is {self.total_bytes}, must be {self.page_bytes} or more")

    @property
    def pages(self) -> int:
        return self.total_bytes // self.page_bytes


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Wall-clock seconds and CPU seconds of one measured action in one round."""

    wall: float
    cpu: float


def run(sizes: StorageSizes, say: Callable[[str], None] = lambda _: None) -> StorageReport:
    """Run the benchmark; removes all pages and directories that it created.

    Raises `ConfigError` if the store cannot be opened, and `StorageError` if the store loses or refuses
    pages. `say` receives progress messages.
    """
    require_memory_twice(sizes.total_bytes)
    parsed = parse_uri(sizes.store)
    backend = make_backend(_with_threads(sizes.store, parsed, sizes.threads))
    directory = limit_directory(parsed)
    load = os.getloadavg()[0]
    # Use one namespace for all rounds, so that the store creates its directories only once, when it
    # writes the first pages of the namespace.
    namespace = secrets.token_hex(16)
    tidied = no_directories_left(directory, namespace) if parsed.scheme == "file" else nullcontext()
    try:
        with tidied:
            turns = asyncio.run(_measure(sizes, backend, namespace, directory, say))
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"the benchmark failed: {reason}; check that {directory} and the store have free space"
        ) from error
    nbytes = sizes.pages * sizes.page_bytes
    wall = {turn: statistics.median(each.wall for each in turns[turn]) for turn in turns}
    cpu = {turn: statistics.median(each.cpu for each in turns[turn]) for turn in turns}
    gbps = {turn: nbytes / seconds / 1e9 for turn, seconds in wall.items()}
    return StorageReport(
        store=parsed.text,
        page_bytes=sizes.page_bytes,
        threads=sizes.threads,
        bytes=nbytes,
        rounds=ROUNDS,
        read_gbps=gbps["read"],
        write_gbps=gbps["write"],
        exists_us_per_key=wall["exists"] / EXISTS_NAMES * 1e6,
        limit_read_gbps=gbps["limit_read"],
        limit_write_gbps=gbps["limit_write"],
        ratio_read=gbps["read"] / gbps["limit_read"],
        ratio_write=gbps["write"] / gbps["limit_write"],
        cpu_s_per_gb=(cpu["read"] + cpu["write"]) / (2 * nbytes / 1e9),
        limit_cpu_s_per_gb=(cpu["limit_read"] + cpu["limit_write"]) / (2 * nbytes / 1e9),
        limit_file=f"a file in {directory}",
        load=load,
        python=platform.python_version(),
        machine=platform.platform(),
        cpus=os.cpu_count() or 1,
    )


async def _measure(
    sizes: StorageSizes,
    backend: StorageBackend,
    namespace: str,
    directory: Path,
    say: Callable[[str], None],
) -> dict[str, list[_Seconds]]:
    """Return the durations of each measured action, one per round."""
    source = pages_in_memory(sizes.page_bytes, sizes.pages)
    target = pages_in_memory(sizes.page_bytes, sizes.pages)
    for number, page in enumerate(source):
        mark = number.to_bytes(8, "little")[: sizes.page_bytes]
        page[: len(mark)] = mark
    await backend.open([*source, *target])
    turns: dict[str, list[_Seconds]] = {}
    bare = BareCalls(directory, sizes.threads)
    try:
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}")
            await _round(_Store(backend, sizes, namespace), bare, source, target, turns)
        say("existence")
        turns["exists"] = await _Store(backend, sizes, namespace).exists()
    finally:
        bare.close()
        await backend.close()
    return turns


async def _round(
    store: "_Store",
    bare: BareCalls,
    source: Sequence[memoryview],
    target: Sequence[memoryview],
    turns: dict[str, list[_Seconds]],
) -> None:
    """Write and read the pages by bare calls, then write and read them through the store."""

    def note(turn: str, begun: _Seconds) -> None:
        now = _now()
        spent = _Seconds(now.wall - begun.wall, now.cpu - begun.cpu)
        turns.setdefault(turn, []).append(spent)

    writes, reads = store.writes(source), store.reads(target)
    begun = _now()
    bare.write(source)
    note("limit_write", begun)
    begun = _now()
    bare.read(target)
    note("limit_read", begun)
    try:
        begun = _now()
        await store.write(writes)
        note("write", begun)
        begun = _now()
        await store.read(reads)
        note("read", begun)
        if any(one != other for one, other in zip(source, target, strict=True)):
            raise StorageError("a page was read back with wrong bytes")
    finally:
        await store.remove()


class _Call(Protocol[Item_contra, Outcome]):
    """The common type of `StorageBackend.read` and `StorageBackend.write`."""

    async def __call__(
        self, items: Sequence[Item_contra], /, *, deadline: float
    ) -> list[Outcome]: ...


class _Store:
    """The KV pages of one round in a store, under new names."""

    def __init__(self, backend: StorageBackend, sizes: StorageSizes, namespace: str) -> None:
        self._backend = backend
        self._shape = ObjectShape.whole(sizes.page_bytes)
        self._namespace = namespace
        self._names = self._new_names(sizes.pages)
        self._batch = max(1, min(BATCH_PAGES, BATCH_BYTES // sizes.page_bytes))
        # Keep one more call in flight than the store has threads, so that no thread of the store is
        # ever idle.
        self._calls = sizes.threads + 1

    def writes(self, pages: Sequence[memoryview]) -> list[Write]:
        """Return the requests to write each page in `pages` under the name at the same position."""
        named = zip(self._names, pages, strict=True)
        return [Write(name, (page,), self._shape) for name, page in named]

    def reads(self, pages: Sequence[memoryview]) -> list[Read]:
        """Return the requests to read each name into the page at the same position in `pages`."""
        named = zip(self._names, pages, strict=True)
        return [Read(name, (page,), self._shape) for name, page in named]

    async def write(self, writes: Sequence[Write]) -> None:
        await self._in_batches(writes, self._backend.write, WriteOutcome.OK)

    async def read(self, reads: Sequence[Read]) -> None:
        await self._in_batches(reads, self._backend.read, ReadOutcome.OK)

    async def remove(self) -> None:
        await self._backend.remove(self._names, deadline=_deadline())

    async def exists(self) -> list[_Seconds]:
        """Look up names that the store has, several times, and return the duration of each lookup."""
        names = self._new_names(EXISTS_NAMES)
        shape, (page,) = ObjectShape.whole(_SMALL_BYTES), pages_in_memory(_SMALL_BYTES, 1)
        spent: list[_Seconds] = []
        try:
            writes = [Write(name, (page,), shape) for name in names]
            await self._in_batches(writes, self._backend.write, WriteOutcome.OK)
            for _ in range(ROUNDS):
                begun = _now()
                found = await self._backend.exists(names, deadline=_deadline())
                now = _now()
                spent.append(_Seconds(now.wall - begun.wall, now.cpu - begun.cpu))
                if not all(found):
                    raise StorageError("the store did not find a page that was just written")
        finally:
            await self._backend.remove(names, deadline=_deadline())
        return spent

    async def _in_batches(
        self,
        items: Sequence[Item],
        call: "_Call[Item, Outcome]",
        expected: Outcome,
    ) -> None:
        """Split `items` into batches and keep several calls in flight until all batches are done."""
        starts = iter(range(0, len(items), self._batch))

        async def some() -> None:
            for start in starts:
                outcomes = await call(items[start : start + self._batch], deadline=_deadline())
                if any(outcome != expected for outcome in outcomes):
                    raise StorageError(f"calls returned {set(outcomes)}, must all be OK")

        ended = await asyncio.gather(*(some() for _ in range(self._calls)), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    def _new_names(self, count: int) -> list[ObjectName]:
        return [
            ObjectName(self._namespace, secrets.token_hex(32), "kv", "l0-1.h0-8")
            for _ in range(count)
        ]


def _with_threads(text: str, uri: StoreUri, threads: int) -> str:
    """Return the URI with the option `threads` added, if its scheme has that option."""
    if uri.scheme != "file":
        return text
    given = uri.options.get("threads")
    if given is None:
        return f"{text}{'&' if '?' in text else '?'}threads={threads}"
    if given != str(threads):
        raise ConfigError(f"--threads is {threads}, but store {uri.text!r} says threads={given}")
    return text


def limit_directory(uri: StoreUri) -> Path:
    """Return the directory for the file of bare calls: on the store's filesystem, or else in memory."""
    if uri.scheme in IN_DIRECTORIES:
        return Path(os.path.normpath(uri.path))
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


def _now() -> _Seconds:
    return _Seconds(time.perf_counter(), time.process_time())


def _deadline() -> float:
    return time.monotonic() + _DEADLINE_S


@contextmanager
def no_directories_left(root: Path, namespace: str) -> Generator[None]:
    """Remove, after a `with` block, the directories that a store in `root` created during the block.

    `namespace` is that of the store's pages; no other process may use it. A store that removes its
    pages leaves the namespace's directories behind. On exit, even after an error, these directories are
    removed if they are empty. If `root` did not exist before, `root` and its new parents are removed,
    unless they contain files of other users.
    """
    made = [each for each in (root, *root.parents) if not os.path.lexists(each)]
    try:
        yield
    finally:
        # Find the namespace's directory, which is two levels above any object's file.
        _remove_if_empty((root / object_path(namespace, bytes(NAME_DIGEST_BYTES))).parents[1])
        if made:
            _remove_if_empty(root)
        for directory in made[1:]:
            with suppress(OSError):
                directory.rmdir()


def _remove_if_empty(top: Path) -> None:
    """Remove a directory and its subdirectories if none of them contains a file."""
    found = list(os.walk(top, topdown=False))
    if any(files for _, _, files in found):
        return
    for directory, _, _ in found:
        with suppress(OSError):
            Path(directory).rmdir()
