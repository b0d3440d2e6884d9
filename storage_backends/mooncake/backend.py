"""`mooncake://host:port?segment_bytes=N&protocol=tcp|rdma...`: a Mooncake Store.

`host:port` is the master of the store. Options:

- `segment_bytes`: bytes of memory that this process contributes to the store, default 0
- `buffer_bytes`: bytes of the client's staging memory
- `protocol`: `tcp` or `rdma`; `device`: the RDMA device
- `metadata`: the metadata server, default `P2PHANDSHAKE`
- `host`: the address at which others reach this process, default 127.0.0.1
- `replicas`: number of copies of each object

An object is the header and payload that a file of `file://` would have, under a key derived from the
digest of its name. The participating processes contribute segments (memory), in which objects are
stored. An object is lost with the process that owns its segment, or with the master. `exists` may stay
true for some seconds after that, so only a read proves that an object exists. While the store has no
space or no segment, writes are FAILED and a warning is logged. Space becomes free when the master
evicts objects. A store with segments on disks may return another object than the requested one. The
backend detects that by the name and the checksums in the object, and removes the object.

While the master is stopped, a call blocks for at most the client's timeout of 30 seconds. The backend
recovers when the master resumes or restarts. While the owner of a segment is stopped, a call of the
library blocks until the library gives up (`pieces`). A read still returns at its deadline, and its
thread stays blocked (`staged_reads`). While all threads are blocked, reads are FAILED at once.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ...errors import ConfigError, UsageError
from ...page_format.object_name import ObjectName, name_digest
from ..base import Capabilities, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..buffers import fitting
from ..error_log import ErrorLog
from ..threaded_backend import Stop, ThreadCalls, ThreadedBackend
from ..uri import StoreUri
from .client import MooncakeClient, MooncakeSettings, connect
from .memory import KEYS_AT_A_TIME, RegisteredMemory
from .names import GENERATIONS, WantedObject, key_of
from .pieces import Code
from .reads import ObjectReader
from .writes import New, ObjectWriter

Connect = Callable[[MooncakeSettings], MooncakeClient]

THREADS: Final = 4
_JOB_BYTES_MIN: Final = 4 << 20
_JOB_NAMES_MIN: Final = 1024
_OPEN_TIMEOUT_S: Final = 60.0
"""Timeout in seconds for joining a store. The library takes 30 seconds to detect that a device does not
exist."""


class MooncakeBackend(ThreadedBackend):
    """A `StorageBackend` in a Mooncake Store.

    Bytes of a write go to the store directly from buffers in the memory passed to `open`. Bytes of
    other writes, and of all reads, are copied through staging memory.
    """

    reader: ObjectReader
    """The reader of objects; None until the store is open."""

    def __init__(self, settings: MooncakeSettings, connect: Connect = connect) -> None:
        super().__init__(
            f"mooncake://{settings.master}",
            "lockstep-mooncake",
            threads=THREADS,
            job_bytes_min=_JOB_BYTES_MIN,
            job_names_min=_JOB_NAMES_MIN,
        )
        self._settings = settings
        self._connect = connect
        self._client: MooncakeClient | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def _open_on(self, calls: ThreadCalls, memory: Sequence[memoryview]) -> None:
        """Join the store and register `memory`; raises `ConfigError` if that is impossible."""
        try:
            await calls.once(lambda: self._join(memory), _OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"store {self._store} did not answer within {_OPEN_TIMEOUT_S:g} s; check that its "
                "master runs"
            ) from error

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether the master has an object; False if its answer is too late."""
        return await self._run_by_names(self._look_up, names, deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers, and verify them.

        Returns at the deadline and on cancellation, even if calls of the library still block. While
        every thread is blocked in such a call, all reads are FAILED at once.
        """
        calls = self._ready()
        if calls is None or calls.left >= THREADS:
            return [ReadOutcome.FAILED] * len(reads)
        pending = [_PendingRead(read) for read in reads]
        await calls.run(
            self._read,
            pending,
            weights=[read.shape.nbytes for read in reads],
            job_weight_min=_JOB_BYTES_MIN,
            late=None,
            deadline=deadline,
            leaves=True,
        )
        return [each.outcome for each in pending]

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Write the objects; an object is FAILED if the store has no space for it."""
        late = WriteOutcome.TIMED_OUT
        return await self._run_by_bytes(self._write, writes, late, deadline)

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects, even if they are being read."""
        return await self._run_by_names(self._remove, names, deadline)

    def objects(self) -> AsyncIterator[StoredObject]:
        """Raise `UsageError`, because the client cannot list."""
        raise UsageError(f"store {self._store} cannot list its objects")

    def _join(self, memory: Sequence[memoryview]) -> None:
        self._client = client = self._connect(self._settings)
        registered = RegisteredMemory(client, memory)
        self.reader = ObjectReader(client, registered)
        complaints = ErrorLog(self._store)
        self._writer = ObjectWriter(client, registered, self.reader, complaints)

    def _give_back(self) -> None:
        """Leave the store; the objects in this process's segment are lost.

        The last thread of this backend calls this when it exits, so no thread is in a call of the
        library.
        """
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _look_up(self, names: Sequence[ObjectName], stop: Stop) -> list[bool]:
        client, found = self._client, [False] * len(names)
        digests = [name_digest(name) for name in names]
        queried = [at for at, digest in enumerate(digests) if digest is not None]
        if client is None or stop.due() or not queried:
            return found
        keys = [key_of(digest) for digest in digests if digest is not None]
        for at, there in zip(queried, client.exist(keys), strict=True):
            found[at] = there
        rest = [(at, digests[at]) for at in queried if not found[at]]
        latest = self.reader.latest([digest for _, digest in rest if digest is not None])
        for (at, _), generation in zip(rest, latest, strict=True):
            found[at] = generation is not None
        return found

    def _read(self, pending: Sequence["_PendingRead"], stop: Stop) -> list[None]:
        wanted = [_wanted(each.read, writable=True) for each in pending]
        unsound = [each for each, want in zip(pending, wanted, strict=True) if want is None]
        _answer(unsound, [ReadOutcome.FAILED] * len(unsound), stop)
        sound = [
            (each, want) for each, want in zip(pending, wanted, strict=True) if want is not None
        ]
        for start in range(0, len(sound), KEYS_AT_A_TIME):
            if stop.due():
                break
            some = sound[start : start + KEYS_AT_A_TIME]
            answers = self.reader.read([want for _, want in some], stop)
            _answer([each for each, _ in some], answers, stop)
        return [None] * len(pending)

    def _write(self, writes: Sequence[Write], stop: Stop) -> list[WriteOutcome]:
        wanted = [_wanted(each, writable=False) for each in writes]
        outcomes = [
            WriteOutcome.FAILED if each is None else WriteOutcome.TIMED_OUT for each in wanted
        ]
        sound = [(at, each) for at, each in enumerate(wanted) if each is not None]
        for start in range(0, len(sound), KEYS_AT_A_TIME):
            if stop.due():
                break
            some = sound[start : start + KEYS_AT_A_TIME]
            answers = self._writer.write([New(writes[at].name, each) for at, each in some], stop)
            for (at, _), outcome in zip(some, answers, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _remove(self, names: Sequence[ObjectName], stop: Stop) -> list[bool]:
        client, removed = self._client, [False] * len(names)
        digests = [(at, name_digest(name)) for at, name in enumerate(names)]
        valid = [(at, digest) for at, digest in digests if digest is not None]
        if client is None or stop.due() or not valid:
            return removed
        keys = list(
            chain.from_iterable(
                [key_of(digest, each) for each in range(GENERATIONS)] for _, digest in valid
            )
        )
        codes = client.remove(keys)
        for number, (at, _) in enumerate(valid):
            some = codes[number * GENERATIONS : (number + 1) * GENERATIONS]
            removed[at] = all(code in (0, Code.NOT_FOUND) for code in some)
        return removed


@dataclass(slots=True, eq=False)
class _PendingRead:
    """A read and its outcome, which stays TIMED_OUT until a thread has finished the read."""

    read: Read
    outcome: ReadOutcome = ReadOutcome.TIMED_OUT


def _answer(pending: Sequence[_PendingRead], outcomes: Sequence[ReadOutcome], stop: Stop) -> None:
    with stop.touching() as wanted:
        for each, outcome in zip(pending, outcomes, strict=True) if wanted else ():
            each.outcome = outcome


def _wanted(request: Read | Write, *, writable: bool) -> WantedObject | None:
    digest = name_digest(request.name)
    buffers = fitting(request.buffers, request.shape.nbytes, writable=writable)
    if digest is None or buffers is None:
        return None
    return WantedObject(digest, [buffer for buffer in buffers if buffer.nbytes], request.shape)


def from_uri(uri: StoreUri) -> MooncakeBackend:
    """Return the backend of a `mooncake://` URI. Raises `ConfigError` for an invalid one."""
    uri.refuse_half_characters()
    host, _, port = uri.host.rpartition(":")
    numeric = port.isascii() and port.isdigit() and len(port) < 6
    if not (host and numeric and 0 < int(port) < 65536):
        raise ConfigError(f"store {uri.text!r} must name the master as mooncake://host:port")
    if uri.path.strip("/"):
        raise ConfigError(f"store {uri.text!r} has a path; write mooncake://host:port?option=value")
    return MooncakeBackend(uri.read(MooncakeSettings, master=uri.host))
