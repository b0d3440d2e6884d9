"""Tests of the contract's promises about callers' buffers (S1, S3), part of `StorageContract`."""

from array import array
from collections.abc import Callable

import pytest

from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, Write, WriteOutcome
from tests.kit.storage.calls import (
    KIB,
    StoreUnderTest,
    found,
    get,
    get_many,
    object_name,
    opened,
    outcomes_of,
    page,
    put_many,
    reading,
    soon,
    writing,
)

SIZE = 16 * KIB
SHAPE = ObjectShape.whole(SIZE)
Views = tuple[memoryview, ...]


def released() -> Views:
    view = memoryview(bytearray(SIZE))
    view.release()
    return (view,)


UNFIT: dict[str, Callable[[], Views]] = {
    "none": tuple,
    "too short": lambda: (memoryview(bytearray(SIZE - 1)),),
    "too long": lambda: (memoryview(bytearray(SIZE + 1)),),
    "far too long": lambda: (memoryview(bytearray(2 << 20)),),
    "too short together": lambda: (memoryview(bytearray(1)), memoryview(bytearray(SIZE - 2))),
    "too long together": lambda: (memoryview(bytearray(SIZE)), memoryview(bytearray(1))),
    "with gaps": lambda: (memoryview(bytearray(2 * SIZE))[::2],),
    "backwards": lambda: (memoryview(bytearray(SIZE))[::-1],),
    "given back": released,
}
UNFIT_TO_READ = UNFIT | {"read-only": lambda: (memoryview(bytes(SIZE)),)}


class BuffersContract:
    """Tests of buffers that have the wrong size, and of objects that are split into several buffers."""

    async def test_s1_a_buffer_that_does_not_fit_costs_its_own_key_alone_in_a_read(
        self, store: StoreUnderTest
    ) -> None:
        last = 1 + len(UNFIT_TO_READ)
        before, behind = bytearray(SIZE), bytearray(SIZE)

        async with opened(store) as backend:
            await put_many(backend, range(last + 1))
            unfit = enumerate(UNFIT_TO_READ.values(), start=1)
            reads = [
                reading(object_name(0), before),
                *(Read(object_name(number), make(), SHAPE) for number, make in unfit),
                reading(object_name(last), behind),
            ]
            outcomes = await backend.read(reads, deadline=soon())
            failed = [ReadOutcome.FAILED] * len(UNFIT_TO_READ)
            assert outcomes == [ReadOutcome.OK, *failed, ReadOutcome.OK]
            assert (before, behind) == (page(0), page(last))
            # The failed reads must leave the stored objects intact.
            assert await get_many(backend, range(last + 1)) == found(range(last + 1))

    async def test_s1_a_buffer_that_does_not_fit_costs_its_own_key_alone_in_a_write(
        self, store: StoreUnderTest
    ) -> None:
        last = 1 + len(UNFIT)
        failed, unwritten = [WriteOutcome.FAILED] * len(UNFIT), range(1, last)

        async with opened(store) as backend:
            writes = [
                writing(object_name(0), page(0)),
                *(Write(object_name(n), make(), SHAPE) for n, make in enumerate(UNFIT.values(), 1)),
                writing(object_name(last), page(last)),
            ]
            outcomes = await backend.write(writes, deadline=soon())
            assert outcomes == [WriteOutcome.OK, *failed, WriteOutcome.OK]
            assert await get_many(backend, (0, last)) == found((0, last))
            assert await outcomes_of(backend, unwritten) == [ReadOutcome.MISSING] * len(UNFIT)
            assert await put_many(backend, unwritten) == [WriteOutcome.OK] * len(UNFIT)

    async def test_bytes_may_lie_in_memory_of_any_plain_form(self, store: StoreUnderTest) -> None:
        empty = memoryview(array("d"))
        source = memoryview(array("d", bytes(page(1))))
        target = memoryview(bytearray(SIZE)).cast("B", (16, KIB))

        async with opened(store) as backend:
            writes = [Write(object_name(1), (empty, source, empty), SHAPE)]
            assert await backend.write(writes, deadline=soon()) == [WriteOutcome.OK]
            reads = [Read(object_name(1), (empty, target), SHAPE)]
            assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK]
            assert target.tobytes() == page(1)

    @pytest.mark.parametrize("count", [64, 65, 511, 512, 1023, 1024, 4000])
    async def test_bytes_may_lie_in_thousands_of_buffers(
        self, store: StoreUnderTest, count: int
    ) -> None:
        content = page(count, 40 * count)
        shape = ObjectShape.whole(len(content))

        def pieces(buffer: bytearray) -> Views:
            return tuple(memoryview(buffer)[at : at + 40] for at in range(0, len(buffer), 40))

        async with opened(store) as backend:
            writes = [Write(object_name(1), pieces(content), shape)]
            assert await backend.write(writes, deadline=soon()) == [WriteOutcome.OK]
            assert await get(backend, object_name(1), shape) == (ReadOutcome.OK, content)
            buffer = bytearray(len(content))
            reads = [Read(object_name(1), pieces(buffer), shape)]
            assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK]
            assert buffer == content
