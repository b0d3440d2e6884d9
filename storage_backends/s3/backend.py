"""`s3://bucket/prefix?endpoint=URL&region=R&concurrency=N&anonymous=0|1`: objects in a bucket.

Each page is one object of the bucket, created only if the name is free (`objects`). `endpoint` is a
server other than Amazon's. `concurrency` is the maximum number of requests in flight. The S3 client
(obstore) takes credentials from the environment of the process or its machine; `anonymous=1` uses none.
With `read_only=1` nothing in the bucket is created, replaced or removed, every write is FAILED, and
credentials to list and read suffice.

The bucket's life cycle decides when objects expire. The store needs conditional writes
(`If-None-Match`, `If-Match`) so that the first writer wins. Opening the store tests them, and refuses a
server that ignores them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Final

from ...errors import ConfigError, StorageError, UsageError
from ...page_format.object_name import OBJECTS, ObjectName
from ..base import Capabilities, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..seen_names import SeenNames
from ..uri import StoreUri
from .address import S3Address, address_of
from .objects import S3Objects
from .requests import RequestFailed, S3Requests

_NAMES_SEEN_MAX: Final = 1 << 20
_OPEN_TIMEOUT_S: Final = 30.0
_TRIALS: Final = "trial"
_TRIAL_OLD_S: Final = 86400.0
"""Age in seconds at which a trial object of the opening test is surely abandoned, even if the clocks of
this host and the store differ."""
_TRIALS_REMOVED_MAX: Final = 32
_LIST_TIMEOUT_S: Final = 60.0
"""Timeout in seconds for one batch of a listing, including reading the headers of its objects."""
_CLOSED: Final = "was closed while it was listed; open it again and list it from the beginning"

_log = logging.getLogger(__name__)


class _DeadlineCalls:
    """Enforces the rules for deadlines and buffers (S2, S3) on the calls of one store.

    All calls are from one event loop. The unfinished work of a call is cancelled at the deadline, when
    the call is cancelled, and when the store is closed. The work has ended when the call returns.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def run(self, work: Coroutine[None, None, None], deadline: float) -> None:
        """Run the work until it is done or `deadline` (a value of `time.monotonic`) has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            work.close()
            return
        scope = asyncio.timeout(left)
        self._running.add(scope)
        self._quiet.clear()
        try:
            async with scope:
                await work
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._running.discard(scope)
            if not self._running:
                self._quiet.set()

    async def close(self) -> None:
        """End all running calls as if their deadlines had passed; wait until they return."""
        for scope in [each for each in self._running if not each.expired()]:
            scope.reschedule(asyncio.get_running_loop().time())
        await self._quiet.wait()


class S3Backend:
    """A `StorageBackend` in a bucket.

    Bytes are hashed, and copied between the caller's buffers and the client, on the one event loop that
    calls the backend. The client does the other work on its threads. `exists` answers from memory for
    names that this backend has seen.
    """

    def __init__(self, address: S3Address) -> None:
        self._address = address
        self.read_only = address.read_only
        self._requests = S3Requests(address)
        self._stored = S3Objects(self._requests, address.concurrency, read_only=address.read_only)
        self._calls = _DeadlineCalls()
        self._seen = SeenNames(_NAMES_SEEN_MAX)
        self._open_was_called = False
        self._opened = False
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(lists=True, writes=not self.read_only)

    async def open(self, memory: Sequence[memoryview] = ()) -> None:  # noqa: ARG002 - any memory will do.
        """Create the client, and test that the bucket supports conditional writes.

        Raises `ConfigError` if the bucket lacks them or does not answer. With `read_only` nothing is
        written, and the test is a listing instead.
        """
        if self._open_was_called or self._closed:
            raise UsageError(f"store {self._address} was opened before; make a new backend")
        self._open_was_called = True
        self._requests.open()
        await self._try_out()
        if self._closed:
            raise UsageError(f"store {self._address} was closed while it opened")
        self._opened = True

    async def _try_out(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                if self.read_only:
                    await self._try_to_list()
                else:
                    await self._try_conditions()
                    await self._remove_old_trials()
        except TimeoutError:
            raise ConfigError(
                f"store {self._address} did not answer within {_OPEN_TIMEOUT_S:g} s; check the "
                f"endpoint ({self._address.endpoint or 'of Amazon'}) and where credentials come from"
            ) from None
        except RequestFailed as error:
            raise ConfigError(
                f"store {self._address} cannot be used: {error.refusal.with_remedy(self._address)}"
            ) from error

    async def _try_to_list(self) -> None:
        """Test that the bucket exists and can be listed; raise an error if not."""
        async for _ in self._requests.listing(OBJECTS):
            return

    async def _try_conditions(self) -> None:
        """Test the conditional writes of the store with a trial object, and remove the object."""
        path = f"{_TRIALS}/{secrets.token_hex(16)}"
        first = await self._requests.create(path, b"1")
        try:
            again = await self._requests.create(path, b"2")
            replaced = not first or await self._requests.replace(path, b"3", first)
            stale = not first or await self._requests.replace(path, b"4", first)
        except RequestFailed:
            await self._requests.delete(path)
            raise
        await self._requests.delete(path)
        if first is None or again is not None or not replaced or (first and stale):
            raise ConfigError(
                f"store {self._address}: the server ignores If-None-Match or If-Match on PUT, so the "
                "first writer cannot win; use one that supports them (Amazon S3 does)"
            )

    async def _remove_old_trials(self) -> None:
        """Remove a few trial objects of processes that died during their test."""
        now = time.time()
        try:
            async for some in self._requests.listing(_TRIALS):
                old = [one.path for one in some if now - one.written.timestamp() >= _TRIAL_OLD_S]
                break
            else:
                return
            for path in old[:_TRIALS_REMOVED_MAX]:
                await self._requests.delete(path)
        except RequestFailed as error:
            # Only log the error: old trial objects do no harm, and some credentials do not permit
            # listing.
            _log.debug("%s", error)

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether the bucket has its object; False if the answer is late."""
        if not self._ready():
            return [False] * len(names)

        async def ask(unknown: Sequence[ObjectName]) -> list[bool]:
            answers = [False] * len(unknown)
            await self._calls.run(self._stored.look_up(unknown, answers), deadline)
            return answers

        return await self._seen.exist(names, ask)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers, and verify them."""
        if not self._ready():
            return [ReadOutcome.FAILED] * len(reads)
        outcomes = [ReadOutcome.TIMED_OUT] * len(reads)
        await self._calls.run(self._stored.read(reads, outcomes), deadline)
        self._seen.note_reads(reads, outcomes)
        return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Write the objects; each appears under its name atomically."""
        if not self._ready() or self.read_only:
            return [WriteOutcome.FAILED] * len(writes)
        outcomes = [WriteOutcome.TIMED_OUT] * len(writes)
        seen = self._seen.look_up([write.name for write in writes])
        await self._calls.run(self._stored.write(writes, outcomes, seen), deadline)
        self._seen.note_writes(writes, outcomes)
        return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Remove the objects; return for each name whether the name is free afterwards."""
        removed = [False] * len(names)
        if self._ready():
            self._seen.discard(names)
            await self._calls.run(self._stored.remove(names, removed), deadline)
        return removed

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects in the store; see `StorageBackend`. Raises `StorageError` if that fails."""
        if not self._ready():
            return
        batches = self._stored.listing()
        while (some := await self._next_of(batches)) is not None:
            for stored in some:
                if self._closed:
                    raise self._not_listed(_CLOSED)
                yield stored

    async def _next_of(
        self, batches: AsyncIterator[list[StoredObject]]
    ) -> list[StoredObject] | None:
        """Return the next batch of a listing, or None after the last. `close` cancels this call."""
        came: list[list[StoredObject] | None] = []

        async def work() -> None:
            came.append(await anext(batches, None))

        try:
            await self._calls.run(work(), time.monotonic() + _LIST_TIMEOUT_S)
        except StorageError as error:
            why = _CLOSED if self._closed else f"could not be listed: {error}"
            raise self._not_listed(why) from error
        if self._closed:
            # Raise an error after `close`, even after the last batch, so that the result does not
            # depend on timing.
            raise self._not_listed(_CLOSED)
        if not came:
            raise self._not_listed(f"did not list within {_LIST_TIMEOUT_S:g} s")
        return came[0]

    def _not_listed(self, why: str) -> StorageError:
        return StorageError(f"store {self._address} {why}")

    async def close(self) -> None:
        """Stop running calls, and drop the client. Idempotent.

        Running calls return as they do at their deadline, and listings raise an error. The store may or
        may not carry out an abandoned request.
        """
        self._closed = True
        await self._calls.close()
        self._requests.close()

    def _ready(self) -> bool:
        """Return whether the backend is open; False after `close`."""
        if not self._opened and not self._closed:
            raise UsageError(f"store {self._address} is not open; await open() first")
        return self._opened and not self._closed


def from_uri(uri: StoreUri) -> S3Backend:
    """Return the backend of an `s3://` URI."""
    return S3Backend(address_of(uri))
