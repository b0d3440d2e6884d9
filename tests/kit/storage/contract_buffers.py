"""The contract's promises about callers' buffers (S1, S3), for `contract.StorageContract`."""

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
    page,
    put,
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
    """A buffer that does not fit harms nobody, and however bytes are cut up, they arrive."""

    @pytest.mark.parametrize("unfit", UNFIT_TO_READ.values(), ids=UNFIT_TO_READ.keys())
    async def test_s1_a_buffer_that_does_not_fit_costs_its_own_key_alone_in_a_read(
        self, store: StoreUnderTest, unfit: Callable[[], Views]
    ) -> None:
        async with opened(store) as backend:
            for number in range(3):
                await put(backend, object_name(number), page(number))
            before, behind = bytearray(SIZE), bytearray(SIZE)
            reads = [
                reading(object_name(0), before),
                Read(object_name(1), unfit(), SHAPE),
                reading(object_name(2), behind),
            ]
            assert await backend.read(reads, deadline=soon()) == [
                ReadOutcome.OK,
                ReadOutcome.FAILED,
                ReadOutcome.OK,
            ]
            assert (before, behind) == (page(0), page(2))
            # Nothing is wrong with the object.
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))

    @pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT.keys())
    async def test_s1_a_buffer_that_does_not_fit_costs_its_own_key_alone_in_a_write(
        self, store: StoreUnderTest, unfit: Callable[[], Views]
    ) -> None:
        async with opened(store) as backend:
            writes = [
                writing(object_name(0), page(0)),
                Write(object_name(1), unfit(), SHAPE),
                writing(object_name(2), page(2)),
            ]
            assert await backend.write(writes, deadline=soon()) == [
                WriteOutcome.OK,
                WriteOutcome.FAILED,
                WriteOutcome.OK,
            ]
            assert await get_many(backend, (0, 2)) == found((0, 2))
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
            assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK

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
