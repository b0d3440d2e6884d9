"""The contract of `storage_backends.base` as tests, which every backend must pass.

A test module provides a `store` fixture and subclasses `StorageContract`. This file tests promises S1
to S7, `contract_parts` and `contract_columns` test S8, and `contract_buffers` tests the callers'
buffers.
"""

import asyncio
import mmap
import random
import time
from contextlib import suppress

import pytest

from lockstep.errors import StorageError
from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from tests.kit.storage.calls import (
    KIB,
    SIZES,
    Found,
    StoreUnderTest,
    found,
    get,
    listed,
    now,
    object_name,
    opened,
    page,
    put,
    put_many,
    reading,
    soon,
    writing,
)
from tests.kit.storage.contract_buffers import BuffersContract
from tests.kit.storage.contract_columns import ColumnsContract
from tests.kit.storage.contract_parts import PartsContract


async def get_once_there(backend: StorageBackend, name: ObjectName, nbytes: int) -> Found:
    """Read an object repeatedly until it exists; return the result of the last read."""
    give_up = soon()
    while (read := await get(backend, name, nbytes))[0] is ReadOutcome.MISSING:
        assert now() < give_up, "nobody has written it in time"
        await asyncio.sleep(0)
    return read


class StorageContract(BuffersContract, ColumnsContract, PartsContract):
    """The whole contract. Each test's name states the promise that it checks."""

    large_batch = 600
    """Number of objects in a large call. Subclasses lower it for stores that take milliseconds per
    object."""

    @pytest.mark.parametrize("nbytes", SIZES)
    async def test_s4_a_page_comes_back_as_it_was_written(
        self, store: StoreUnderTest, nbytes: int
    ) -> None:
        async with opened(store) as backend:
            assert await put(backend, object_name(1), page(1, nbytes)) is WriteOutcome.OK
            assert await get(backend, object_name(1), nbytes) == (ReadOutcome.OK, page(1, nbytes))

    async def test_s1_a_call_gives_one_outcome_for_each_key_in_its_order(
        self, store: StoreUnderTest
    ) -> None:
        impossible = ObjectName(namespace="../..", key="ab", pool="kv", shard="x")
        order = [object_name(5), object_name(9), object_name(2), impossible, object_name(0)]

        async with opened(store) as backend:
            await put_many(backend, (0, 2, 5))
            store.spoil(object_name(2))
            assert await backend.exists(order, deadline=soon()) == [True, False, True, False, True]
            buffers = [bytearray(16 * KIB) for _ in order]
            reads = [reading(name, each) for name, each in zip(order, buffers, strict=True)]
            assert await backend.read(reads, deadline=soon()) == [
                ReadOutcome.OK,
                ReadOutcome.MISSING,
                ReadOutcome.CORRUPT,
                ReadOutcome.FAILED,
                ReadOutcome.OK,
            ]
            assert (buffers[0], buffers[4]) == (page(5), page(0))
            writes = [writing(name, page(1)) for name in order]
            assert await backend.write(writes, deadline=soon()) == [
                WriteOutcome.PRESENT,
                WriteOutcome.OK,
                WriteOutcome.OK,
                WriteOutcome.FAILED,
                WriteOutcome.PRESENT,
            ]
            assert await backend.remove(order, deadline=soon()) == [True, True, True, False, True]

    async def test_s1_an_empty_call_gives_nothing(self, store: StoreUnderTest) -> None:
        async with opened(store) as backend:
            assert await backend.exists([], deadline=soon()) == []
            assert await backend.read([], deadline=soon()) == []
            assert await backend.write([], deadline=soon()) == []
            assert await backend.remove([], deadline=soon()) == []

    async def test_s1_a_large_batch_keeps_its_order(self, store: StoreUnderTest) -> None:
        count = self.large_batch
        numbers = list(range(count))
        random.Random(7).shuffle(numbers)

        async with opened(store) as backend:
            writes = [writing(object_name(n), page(n, 9000)) for n in numbers]
            assert set(await backend.write(writes, deadline=soon())) == {WriteOutcome.OK}
            buffers = [bytearray(9000) for _ in range(count)]
            reads = [reading(object_name(n), buffers[n]) for n in range(count)]
            assert set(await backend.read(reads, deadline=soon())) == {ReadOutcome.OK}
            assert buffers == [page(n, 9000) for n in range(count)]

    async def test_s2_what_is_late_is_timed_out_and_not_done(self, store: StoreUnderTest) -> None:
        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            late = time.monotonic() - 1.0
            buffers = [bytearray(16 * KIB) for _ in range(3)]
            reads = [reading(object_name(1), each) for each in buffers]
            assert await backend.read(reads, deadline=late) == [ReadOutcome.TIMED_OUT] * 3
            assert buffers == [bytearray(16 * KIB)] * 3
            writes = [writing(object_name(2), page(2))]
            assert await backend.write(writes, deadline=late) == [WriteOutcome.TIMED_OUT]
            assert (await get(backend, object_name(2)))[0] is ReadOutcome.MISSING

    async def test_s3_after_a_cancelled_read_nothing_touches_the_buffers(
        self, store: StoreUnderTest
    ) -> None:
        async with opened(store) as backend:
            pages = [page(n, 1 << 20) for n in range(24)]
            writes = [writing(object_name(n), pages[n]) for n in range(24)]
            await backend.write(writes, deadline=soon())
            buffers = [bytearray(1 << 20) for _ in range(24)]
            reads = [reading(object_name(n), buffers[n]) for n in range(24)]
            call = asyncio.create_task(backend.read(reads, deadline=soon()))
            await asyncio.sleep(0)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            mark = bytes([0xEE]) * (1 << 20)
            for buffer in buffers:
                buffer[:] = mark
            # Close the backend. The close waits for every call that could still write to the buffers.
            await backend.close()
            assert all(buffer == mark for buffer in buffers)

    async def test_s4_a_corrupt_page_is_a_miss_and_never_data(self, store: StoreUnderTest) -> None:
        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            store.spoil(object_name(1))
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
            assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))

    async def test_s4_the_object_of_another_name_is_never_served(
        self, store: StoreUnderTest
    ) -> None:
        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            store.pass_off(object_name(1), object_name(2))
            assert (await get(backend, object_name(2)))[0] is ReadOutcome.CORRUPT
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))

    async def test_s4_an_object_of_another_length_is_never_served(
        self, store: StoreUnderTest
    ) -> None:
        others = (1, 16 * KIB - 1, 16 * KIB + 1, 2 << 20)

        async with opened(store) as backend:
            await put_many(backend, range(len(others)))
            read = [await get(backend, object_name(n), other) for n, other in enumerate(others)]
            assert [outcome for outcome, _ in read] == [ReadOutcome.CORRUPT] * len(others)

    async def test_s5_a_reader_sees_a_write_whole_or_not_at_all(
        self, store: StoreUnderTest
    ) -> None:
        size = 1 << 20
        content = page(1, size)

        async with opened(store) as writer, opened(store) as reader:
            names = [object_name(number) for number in range(20)]
            seen = [
                await asyncio.gather(get_once_there(reader, name, size), put(writer, name, content))
                for name in names
            ]
            assert [read for read, _ in seen] == [(ReadOutcome.OK, content)] * 20
            assert [written for _, written in seen] == [WriteOutcome.OK] * 20

    async def test_s6_the_first_writer_wins_and_a_later_one_learns_it(
        self, store: StoreUnderTest
    ) -> None:
        async with opened(store) as first, opened(store) as second:
            assert await put(first, object_name(1), page(1)) is WriteOutcome.OK
            assert await put(first, object_name(1), page(2)) is WriteOutcome.PRESENT
            assert await put(second, object_name(1), page(3)) is WriteOutcome.PRESENT
            assert await get(second, object_name(1)) == (ReadOutcome.OK, page(1))

    async def test_s6_of_many_writers_at_once_exactly_one_wins(self, store: StoreUnderTest) -> None:
        async with opened(store) as first, opened(store) as second:
            results = [
                await asyncio.gather(
                    *(
                        put((first, second)[each % 2], object_name(number), page(each))
                        for each in range(6)
                    )
                )
                for number in range(self.races)
            ]
            one_wins = [WriteOutcome.OK] + [WriteOutcome.PRESENT] * 5
            assert [sorted(outcomes) for outcomes in results] == [one_wins] * self.races
            winners = [outcomes.index(WriteOutcome.OK) for outcomes in results]
            read = [await get(first, object_name(number)) for number in range(self.races)]
            assert read == found(winners)

    async def test_bytes_go_to_and_from_memory_that_the_store_was_told_of_as_to_and_from_any_other(
        self, store: StoreUnderTest
    ) -> None:
        nbytes, pages = 16 * KIB, 8
        memory = memoryview(mmap.mmap(-1, 2 * pages * nbytes))
        slots = [memory[n * nbytes : (n + 1) * nbytes] for n in range(2 * pages)]

        async with opened(store, [memory]) as backend:
            for number in range(pages):
                slots[number][:] = page(number)
            writes = [writing(object_name(n), slots[n]) for n in range(pages)]
            assert set(await backend.write(writes, deadline=soon())) == {WriteOutcome.OK}
            reads = [reading(object_name(n), slots[pages + n]) for n in range(pages)]
            assert set(await backend.read(reads, deadline=soon())) == {ReadOutcome.OK}
            assert [bytes(slots[pages + n]) for n in range(pages)] == [
                bytes(page(n)) for n in range(pages)
            ]
            assert [await get(backend, object_name(n)) for n in range(pages)] == [
                (ReadOutcome.OK, page(n)) for n in range(pages)
            ]

    async def test_s7_existence_may_be_out_of_date_until_a_read_decides(
        self, store: StoreUnderTest
    ) -> None:
        async with opened(store) as backend, opened(store) as other:
            await put(backend, object_name(1), page(1))
            assert await backend.exists([object_name(1)], deadline=soon()) == [True]
            assert await other.remove([object_name(1)], deadline=soon()) == [True]
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
            assert await backend.exists([object_name(1)], deadline=soon()) == [False]

    async def test_a_removed_name_is_free_again(self, store: StoreUnderTest) -> None:
        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            names = [object_name(1), object_name(2)]
            assert await backend.remove(names, deadline=soon()) == [True, True]
            assert await backend.exists(names, deadline=soon()) == [False, False]
            assert await put(backend, object_name(1), page(3)) is WriteOutcome.OK
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(3))

    async def test_closing_twice_is_closing_once_and_a_closed_store_answers_failed(
        self, store: StoreUnderTest
    ) -> None:
        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            await backend.close()
            await backend.close()
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
            assert await put(backend, object_name(2), page(2)) is WriteOutcome.FAILED
            assert await backend.exists([object_name(1)], deadline=soon()) == [False]
            assert await backend.remove([object_name(1)], deadline=soon()) == [False]


class ListingContract:
    """The contract of stores that can list their objects."""

    async def test_a_listing_that_the_close_comes_into_says_so_and_does_not_just_end(
        self, store: StoreUnderTest
    ) -> None:
        backend = store.backend()
        await backend.open()
        await put_many(backend, range(3))
        listing = aiter(backend.objects())
        await anext(listing)
        await backend.close()

        # Listing must fail after the close. If the listing merely ended, objects not yet listed would
        # look deleted.
        with pytest.raises(StorageError, match="closed while it was listed; open it again"):
            _ = [each async for each in listing]
        assert await listed(backend) == []
