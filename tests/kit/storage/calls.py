"""What the tests of stores share: objects of known bytes, and short forms of a backend's calls."""

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
"""What became of a read, and what its buffer holds then."""
KIB = 1 << 10
SIZES = (1, 4095, 4 * KIB, 16 * KIB, 256 * KIB, 256 * KIB + 1, 1 << 20, (1 << 20) + 4097)
OPTIONAL_BYTES = (4 * KIB, 4 * KIB, 9001)
"""Optional columns, two of them of one length, so that lengths do not tell which is there."""
HEALTHY_S = 60.0
"""No healthy call takes as long."""
EVERY = (1 << len(OPTIONAL_BYTES)) - 1
"""The presence bits of a page with all of them."""


class StoreUnderTest(Protocol):
    """One store, and what a test needs to look behind its back."""

    def backend(self) -> StorageBackend:
        """Return a new backend on this same store, not open yet."""
        ...

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        """Flip one bit of byte `at` of the object's payload where it is stored."""
        ...

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        """Store a copy of what is stored under `name` under `other`."""
        ...


def object_name(number: int, pool: str = "kv") -> ObjectName:
    return ObjectName(namespace="ab" * 32, key=f"{number:064x}", pool=pool, shard="l0-4.h0-2")


def digest_of(name: ObjectName) -> bytes:
    """What the object is called where it is stored; the name must be possible."""
    digest = name_digest(name)
    assert digest is not None
    return digest


def page(number: int, nbytes: int = 16 * KIB) -> bytearray:
    return bytearray(_drawn(number, nbytes))


@lru_cache(maxsize=1024)
def _drawn(number: int, nbytes: int) -> bytes:
    """The same few pages are written again and again, and to draw one takes longer than to write it."""
    return random.Random(number).randbytes(nbytes)


def now() -> float:
    """The time on the running loop's clock; the clock to give to what is tested."""
    return asyncio.get_running_loop().time()


def soon() -> float:
    """A deadline that no healthy call comes near, on the running loop's clock."""
    return now() + HEALTHY_S


def soon_off_loop() -> float:
    """The same for blocking calls, which go by the machine's clock."""
    return time.monotonic() + HEALTHY_S


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(scenario)


@asynccontextmanager
async def using(backend: Backend, memory: Sequence[memoryview] = ()) -> AsyncGenerator[Backend]:
    """A backend, open while in here."""
    await backend.open(memory)
    try:
        yield backend
    finally:
        await backend.close()


def opened(
    store: StoreUnderTest, memory: Sequence[memoryview] = ()
) -> AbstractAsyncContextManager[StorageBackend]:
    """A new backend on this store, open while in here."""
    return using(store.backend(), memory)


def opened_at(uri: str) -> AbstractAsyncContextManager[StorageBackend]:
    """The backend of a URI, open while in here."""
    return using(make_backend(uri))


def reading(
    name: ObjectName, buffer: bytearray | memoryview, shape: ObjectShape | None = None
) -> Read:
    """A read into one buffer, of an object that is one part if nothing else is said."""
    return Read(name, (memoryview(buffer),), shape or ObjectShape.whole(len(buffer)))


def writing(
    name: ObjectName, content: bytearray | bytes | memoryview, shape: ObjectShape | None = None
) -> Write:
    """A write from one buffer, as an object that is one part if nothing else is said."""
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
    """Read what `shape` holds, or the one part of so many bytes."""
    shape = ObjectShape.whole(shape) if isinstance(shape, int) else shape
    buffer = bytearray(shape.nbytes)
    (outcome,) = await backend.read([reading(name, buffer, shape)], deadline=soon())
    return outcome, buffer


async def put_many(
    backend: StorageBackend, numbers: Iterable[int], nbytes: int = 16 * KIB
) -> list[WriteOutcome]:
    """Write the pages of these numbers in one call."""
    writes = [writing(object_name(number), page(number, nbytes)) for number in numbers]
    return await backend.write(writes, deadline=soon())


async def put_each(backend: StorageBackend, numbers: Iterable[int]) -> set[WriteOutcome]:
    """Write each of these pages in a call of its own."""
    return {await put(backend, object_name(number), page(number)) for number in numbers}


async def get_many(
    backend: StorageBackend, numbers: Iterable[int], nbytes: int = 16 * KIB
) -> list[Found]:
    """Read the pages of these numbers in one call."""
    buffers = {number: bytearray(nbytes) for number in numbers}
    # One shape for all of them, as the pages of a pool have.
    shape = ObjectShape.whole(nbytes)
    reads = [reading(object_name(number), buffer, shape) for number, buffer in buffers.items()]
    outcomes = await backend.read(reads, deadline=soon())
    return list(zip(outcomes, buffers.values(), strict=True))


async def outcomes_of(
    backend: StorageBackend, numbers: Iterable[int], nbytes: int = 16 * KIB
) -> list[ReadOutcome]:
    """Read the pages of these numbers in one call, and say only what became of each."""
    return [outcome for outcome, _ in await get_many(backend, numbers, nbytes)]


def found(numbers: Iterable[int], nbytes: int = 16 * KIB) -> list[Found]:
    """What `get_many` returns where all of these pages are there."""
    return [(ReadOutcome.OK, page(number, nbytes)) for number in numbers]


def wrongly_served(
    numbers: Iterable[int], read: Iterable[Found], nbytes: int = 16 * KIB
) -> list[int]:
    """Which of these pages were read as OK with other bytes than their own."""
    return [
        number
        for number, (outcome, content) in zip(numbers, read, strict=True)
        if outcome is ReadOutcome.OK and content != page(number, nbytes)
    ]


async def listed(backend: StorageBackend) -> list[StoredObject]:
    return [each async for each in backend.objects()]


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def eventually(ask: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is yes; fails where that takes longer than any healthy call."""
    give_up = soon()
    while not await ask():
        assert now() < give_up, "it did not happen in time"
        await asyncio.sleep(0.01)


def columns(present: int, nbytes: int = 16 * KIB) -> ObjectShape:
    """A page of `nbytes` that every engine keeps, and of `OPTIONAL_BYTES` those of `present`."""
    optional = [Part(length, bit) for bit, length in enumerate(OPTIONAL_BYTES)]
    held = [1 + bit for bit in range(len(optional)) if present >> bit & 1]
    return ObjectShape((Part(nbytes), *optional), (0, *held))


def full_page(present: int, author: int = 1, nbytes: int = 16 * KIB) -> bytearray:
    """What an author writes as `columns(present, nbytes)`."""
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
    """The content as several buffers, cut at these places, in order."""
    ends = [0, *places, len(content)]
    return tuple(memoryview(content)[start:end] for start, end in pairwise(ends))
