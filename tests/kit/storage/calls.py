"""Helpers for tests of stores: objects with known bytes, and short forms of backend calls."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from lockstep.page_format.object_name import ObjectName, name_digest
from lockstep.page_format.object_shape import ObjectShape, Part
from lockstep.storage_backends.base import (
    Read,
    ReadOutcome,
    StorageBackend,
    StoredObject,
    Write,
    WriteOutcome,
)
from lockstep.storage_backends.registry import make_backend

T = TypeVar("T")
Backend = TypeVar("Backend", bound=StorageBackend)
Found = tuple[ReadOutcome, bytearray]
"""The outcome of a read, and the content of the read's buffer afterwards."""
KIB = 1 << 10
SIZES = (1, 4095, 4 * KIB, 16 * KIB, 256 * KIB, 256 * KIB + 1, 1 << 20, (1 << 20) + 4097)
OPTIONAL_BYTES = (4 * KIB, 4 * KIB, 9001)
"""Sizes of the optional columns in bytes. Two columns have the same size, so that the size alone does
not identify a column."""
HEALTHY_S = 60.0
"""Seconds within which every healthy call completes."""
EVERY = (1 << len(OPTIONAL_BYTES)) - 1
"""The presence bits of all optional columns, one bit for each column."""


class StoreUnderTest(Protocol):
    """A store for the contract suite; tests can also change its objects directly, without a backend."""

    def backend(self) -> StorageBackend:
        """Return a new, unopened backend on this store."""
        ...

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        """Flip one bit of the object's stored payload, in the byte at offset `at`."""
        ...

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        """Store a copy of the object `name` under the name `other`."""
        ...


def object_name(number: int, pool: str = "kv") -> ObjectName:
    return ObjectName(namespace="ab" * 32, key=f"{number:064x}", pool=pool, shard="l0-4.h0-2")


def digest_of(name: ObjectName) -> bytes:
    """Return the digest under which a store keeps the object of this name."""
    digest = name_digest(name)
    assert digest is not None
    return digest


def page(number: int, nbytes: int = 16 * KIB) -> bytearray:
    return bytearray(_drawn(number, nbytes))


@lru_cache(maxsize=1024)
def _drawn(number: int, nbytes: int) -> bytes:
    """Return random bytes for a page. They are cached, because drawing them again would be slow."""
    return random.Random(number).randbytes(nbytes)


def now() -> float:
    """Return the event loop's time. Tests also pass this function to backends as the clock."""
    return asyncio.get_running_loop().time()


def soon() -> float:
    """Return a deadline on the event loop's clock that no healthy call reaches."""
    return now() + HEALTHY_S


def soon_off_loop() -> float:
    """Return a deadline on the monotonic clock, for blocking calls outside the event loop."""
    return time.monotonic() + HEALTHY_S


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(scenario)


@asynccontextmanager
async def using(backend: Backend, memory: Sequence[memoryview] = ()) -> AsyncGenerator[Backend]:
    """Open a backend for the duration of the block."""
    await backend.open(memory)
    try:
        yield backend
    finally:
        await backend.close()


def opened(
    store: StoreUnderTest, memory: Sequence[memoryview] = ()
) -> AbstractAsyncContextManager[StorageBackend]:
    """Open a new backend on the given store for the duration of the block."""
    return using(store.backend(), memory)


def opened_at(uri: str) -> AbstractAsyncContextManager[StorageBackend]:
    """Open the backend of a URI for the duration of the block."""
    return using(make_backend(uri))


def reading(
    name: ObjectName, buffer: bytearray | memoryview, shape: ObjectShape | None = None
) -> Read:
    """Return a `Read` into one buffer. The default shape is a single part as large as the buffer."""
    return Read(name, (memoryview(buffer),), shape or ObjectShape.whole(len(buffer)))


def writing(
    name: ObjectName, content: bytearray | bytes | memoryview, shape: ObjectShape | None = None
) -> Write:
    """Return a `Write` from one buffer. The default shape is a single part as large as the buffer."""
    return Write(name, (memoryview(content),), shape or ObjectShape.whole(len(content)))


async def put(
    backend: StorageBackend,
    name: ObjectName,
    content: bytearray | bytes | memoryview,
    shape: ObjectShape | None = None,
) -> WriteOutcome:
    (outcome,) = await backend.write([writing(name, content, shape)], deadline=soon())
    return outcome


async def get(
    backend: StorageBackend, name: ObjectName, shape: ObjectShape | int = 16 * KIB
) -> Found:
    """Read an object; return the outcome and the buffer.

    If `shape` is a number, the object has a single part of that many bytes.
    """
    shape = ObjectShape.whole(shape) if isinstance(shape, int) else shape
    buffer = bytearray(shape.nbytes)
    (outcome,) = await backend.read([reading(name, buffer, shape)], deadline=soon())
    return outcome, buffer


async def put_many(
    backend: StorageBackend, numbers: Iterable[int], nbytes: int = 16 * KIB
) -> list[WriteOutcome]:
    writes = [writing(object_name(number), page(number, nbytes)) for number in numbers]
    return await backend.write(writes, deadline=soon())


async def put_each(backend: StorageBackend, numbers: Iterable[int]) -> set[WriteOutcome]:
    """Write each page in a separate call; return the set of all outcomes."""
    return {await put(backend, object_name(number), page(number)) for number in numbers}


async def get_many(
    backend: StorageBackend, numbers: Iterable[int], nbytes: int = 16 * KIB
) -> list[Found]:
    buffers = {number: bytearray(nbytes) for number in numbers}
    # Share one shape object among all reads, as real reads of a pool's pages do.
    shape = ObjectShape.whole(nbytes)
    reads = [reading(object_name(number), buffer, shape) for number, buffer in buffers.items()]
    outcomes = await backend.read(reads, deadline=soon())
    return list(zip(outcomes, buffers.values(), strict=True))


async def outcomes_of(
    backend: StorageBackend, numbers: Iterable[int], nbytes: int = 16 * KIB
) -> list[ReadOutcome]:
    """Read these pages in one call; return only the outcomes."""
    return [outcome for outcome, _ in await get_many(backend, numbers, nbytes)]


def found(numbers: Iterable[int], nbytes: int = 16 * KIB) -> list[Found]:
    """Return the outcomes and contents that reads of these pages yield if the store has them all."""
    return [(ReadOutcome.OK, page(number, nbytes)) for number in numbers]


def wrongly_served(
    numbers: Iterable[int], read: Iterable[Found], nbytes: int = 16 * KIB
) -> list[int]:
    """Return the numbers of pages whose read had the outcome OK but returned wrong bytes."""
    return [
        number
        for number, (outcome, content) in zip(numbers, read, strict=True)
        if outcome is ReadOutcome.OK and content != page(number, nbytes)
    ]


async def listed(backend: StorageBackend) -> list[StoredObject]:
    return [each async for each in backend.objects()]


async def turns() -> None:
    """Let the event loop iterate 20 times, so that every task that is ready can run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def eventually(ask: Callable[[], Awaitable[bool]]) -> None:
    """Repeat `ask` until it returns true; fail after `HEALTHY_S`."""
    give_up = soon()
    while not await ask():
        assert now() < give_up, "it did not happen in time"
        await asyncio.sleep(0.01)


def columns(present: int, nbytes: int = 16 * KIB) -> ObjectShape:
    """Return a shape with `nbytes` of required columns and the optional columns in `present`."""
    optional = [Part(length, bit) for bit, length in enumerate(OPTIONAL_BYTES)]
    held = [1 + bit for bit in range(len(optional)) if present >> bit & 1]
    return ObjectShape((Part(nbytes), *optional), (0, *held))


def full_page(present: int, author: int = 1, nbytes: int = 16 * KIB) -> bytearray:
    """Return a page with the optional columns `present`, whose bytes depend on the number `author`."""
    content = page(author, nbytes)
    for number, length in enumerate(OPTIONAL_BYTES):
        content += page(10 * author + number, length) if present >> number & 1 else b""
    return content


async def put_columns(
    backend: StorageBackend, name: ObjectName, present: int, author: int = 1, nbytes: int = 16 * KIB
) -> WriteOutcome:
    content = full_page(present, author, nbytes)
    return await put(backend, name, content, columns(present, nbytes))


async def get_columns(
    backend: StorageBackend, name: ObjectName, present: int, nbytes: int = 16 * KIB
) -> Found:
    return await get(backend, name, columns(present, nbytes))


def cut(content: bytearray, places: Sequence[int]) -> tuple[memoryview, ...]:
    """Split the content at these offsets into several buffers, in order."""
    ends = [0, *places, len(content)]
    return tuple(memoryview(content)[start:end] for start, end in pairwise(ends))
