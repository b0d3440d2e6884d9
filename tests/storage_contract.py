"""The contract of `storage_backends.base`, as tests that every backend must pass.

A test module gives a `store` fixture and makes a subclass of `StorageContract`.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import pytest

from lockstep.storage_backends.base import (
    ObjectName,
    Read,
    ReadOutcome,
    StorageBackend,
    Write,
    WriteOutcome,
)
from lockstep.storage_backends.optional_columns import NONE_OPTIONAL, OptionalColumns

T = TypeVar("T")
KIB = 1 << 10
SIZES = (1, 4095, 4 * KIB, 16 * KIB, 256 * KIB, 256 * KIB + 1, 1 << 20, (1 << 20) + 4097)
OPTIONAL_BYTES = (4 * KIB, 4 * KIB, 9001)
"""Optional columns, two of them of one length, so that lengths do not tell which is there."""
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


def page(number: int, nbytes: int = 16 * KIB) -> bytearray:
    return bytearray(random.Random(number).randbytes(nbytes))


def soon() -> float:
    """A deadline that no healthy call comes near."""
    return time.monotonic() + 60.0


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(scenario)


@asynccontextmanager
async def opened(store: StoreUnderTest) -> AsyncGenerator[StorageBackend]:
    backend = store.backend()
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def put(
    backend: StorageBackend,
    name: ObjectName,
    content: bytearray,
    optional: OptionalColumns = NONE_OPTIONAL,
) -> WriteOutcome:
    (outcome,) = await backend.write([Write(name, memoryview(content), optional)], deadline=soon())
    return outcome


async def get(
    backend: StorageBackend,
    name: ObjectName,
    nbytes: int = 16 * KIB,
    optional: OptionalColumns = NONE_OPTIONAL,
) -> tuple[ReadOutcome, bytearray]:
    buffer = bytearray(nbytes)
    (outcome,) = await backend.read([Read(name, memoryview(buffer), optional)], deadline=soon())
    return outcome, buffer


def columns(present: int) -> OptionalColumns:
    """The columns of `OPTIONAL_BYTES`, and a buffer that has those of `present`."""
    return OptionalColumns(nbytes=OPTIONAL_BYTES, present=present)


def full_page(present: int, author: int = 1, nbytes: int = 16 * KIB) -> bytearray:
    """What an author writes: `nbytes` that every engine keeps, and the columns of `present`."""
    content = page(author, nbytes)
    for number, length in enumerate(OPTIONAL_BYTES):
        content += page(10 * author + number, length) if present >> number & 1 else b""
    return content


async def put_columns(
    backend: StorageBackend,
    name: ObjectName,
    present: int,
    author: int = 1,
    nbytes: int = 16 * KIB,
) -> WriteOutcome:
    return await put(backend, name, full_page(present, author, nbytes), columns(present))


async def get_columns(
    backend: StorageBackend, name: ObjectName, present: int, nbytes: int = 16 * KIB
) -> tuple[ReadOutcome, bytearray]:
    length = len(full_page(present, nbytes=nbytes))
    return await get(backend, name, length, columns(present))


class StorageContract:
    """The promises S1 to S8, each test named after what it holds the backend to."""

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_s4_a_page_comes_back_as_it_was_written(
        self, store: StoreUnderTest, nbytes: int
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                assert await put(backend, object_name(1), page(1, nbytes)) is WriteOutcome.OK
                assert await get(backend, object_name(1), nbytes) == (
                    ReadOutcome.OK,
                    page(1, nbytes),
                )

        run(scenario())

    def test_s1_a_call_gives_one_outcome_for_each_key_in_its_order(
        self, store: StoreUnderTest
    ) -> None:
        impossible = ObjectName(namespace="../..", key="ab", pool="kv", shard="x")
        order = [object_name(5), object_name(9), object_name(2), impossible, object_name(0)]

        async def scenario() -> None:
            async with opened(store) as backend:
                for number in (0, 2, 5):
                    await put(backend, object_name(number), page(number))
                store.spoil(object_name(2))
                assert await backend.exists(order, deadline=soon()) == [
                    True,
                    False,
                    True,
                    False,
                    True,
                ]
                buffers = [bytearray(16 * KIB) for _ in order]
                reads = [
                    Read(name, memoryview(each)) for name, each in zip(order, buffers, strict=True)
                ]
                assert await backend.read(reads, deadline=soon()) == [
                    ReadOutcome.OK,
                    ReadOutcome.MISSING,
                    ReadOutcome.CORRUPT,
                    ReadOutcome.FAILED,
                    ReadOutcome.OK,
                ]
                assert (buffers[0], buffers[4]) == (page(5), page(0))
                writes = [Write(name, memoryview(page(1))) for name in order]
                assert await backend.write(writes, deadline=soon()) == [
                    WriteOutcome.PRESENT,
                    WriteOutcome.OK,
                    WriteOutcome.OK,
                    WriteOutcome.FAILED,
                    WriteOutcome.PRESENT,
                ]
                assert await backend.remove(order, deadline=soon()) == [
                    True,
                    True,
                    True,
                    False,
                    True,
                ]

        run(scenario())

    def test_s1_an_empty_call_gives_nothing(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                assert await backend.exists([], deadline=soon()) == []
                assert await backend.read([], deadline=soon()) == []
                assert await backend.write([], deadline=soon()) == []
                assert await backend.remove([], deadline=soon()) == []

        run(scenario())

    def test_s1_a_large_batch_keeps_its_order(self, store: StoreUnderTest) -> None:
        numbers = list(range(600))
        random.Random(7).shuffle(numbers)

        async def scenario() -> None:
            async with opened(store) as backend:
                writes = [Write(object_name(n), memoryview(page(n, 9000))) for n in numbers]
                assert set(await backend.write(writes, deadline=soon())) == {WriteOutcome.OK}
                buffers = [bytearray(9000) for _ in range(600)]
                reads = [Read(object_name(n), memoryview(buffers[n])) for n in range(600)]
                assert set(await backend.read(reads, deadline=soon())) == {ReadOutcome.OK}
                assert buffers == [page(n, 9000) for n in range(600)]

        run(scenario())

    def test_s2_what_is_late_is_timed_out_and_not_done(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                late = time.monotonic() - 1.0
                buffers = [bytearray(16 * KIB) for _ in range(3)]
                reads = [Read(object_name(1), memoryview(each)) for each in buffers]
                assert await backend.read(reads, deadline=late) == [ReadOutcome.TIMED_OUT] * 3
                assert buffers == [bytearray(16 * KIB)] * 3
                writes = [Write(object_name(2), memoryview(page(2)))]
                assert await backend.write(writes, deadline=late) == [WriteOutcome.TIMED_OUT]
                assert (await get(backend, object_name(2)))[0] is ReadOutcome.MISSING

        run(scenario())

    def test_s3_after_a_cancelled_read_nothing_touches_the_buffers(
        self, store: StoreUnderTest
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                pages = [page(n, 1 << 20) for n in range(24)]
                writes = [Write(object_name(n), memoryview(pages[n])) for n in range(24)]
                await backend.write(writes, deadline=soon())
                buffers = [bytearray(1 << 20) for _ in range(24)]
                reads = [Read(object_name(n), memoryview(buffers[n])) for n in range(24)]
                call = asyncio.create_task(backend.read(reads, deadline=soon()))
                await asyncio.sleep(0)
                call.cancel()
                with suppress(asyncio.CancelledError):
                    await call
                mark = bytes([0xEE]) * (1 << 20)
                for buffer in buffers:
                    buffer[:] = mark
                # Closing waits for everything that could still run.
                await backend.close()
                assert all(buffer == mark for buffer in buffers)

        run(scenario())

    def test_s4_a_corrupt_page_is_a_miss_and_never_data(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                store.spoil(object_name(1))
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
                assert backend.counters().reads_corrupt == 1
                assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK
                assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))

        run(scenario())

    def test_s4_the_object_of_another_name_is_never_served(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                store.pass_off(object_name(1), object_name(2))
                assert (await get(backend, object_name(2)))[0] is ReadOutcome.CORRUPT
                assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))

        run(scenario())

    @pytest.mark.parametrize("expected", [1, 16 * KIB - 1, 16 * KIB + 1, 2 << 20])
    def test_s4_an_object_of_another_length_is_never_served(
        self, store: StoreUnderTest, expected: int
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                assert (await get(backend, object_name(1), expected))[0] is ReadOutcome.CORRUPT

        run(scenario())

    def test_s4_names_that_differ_in_any_part_are_different_objects(
        self, store: StoreUnderTest
    ) -> None:
        names = [
            ObjectName("aa", "bb", "kv", "s"),
            ObjectName("ab", "bb", "kv", "s"),
            ObjectName("aa", "bc", "kv", "s"),
            ObjectName("aa", "bb", "kw", "s"),
            ObjectName("aa", "bb", "kv", "t"),
        ]

        async def scenario() -> None:
            async with opened(store) as backend:
                for number, name in enumerate(names):
                    assert await put(backend, name, page(number)) is WriteOutcome.OK
                for number, name in enumerate(names):
                    assert await get(backend, name) == (ReadOutcome.OK, page(number))

        run(scenario())

    def test_s5_a_reader_sees_a_write_whole_or_not_at_all(self, store: StoreUnderTest) -> None:
        size = 1 << 20

        async def scenario() -> None:
            async with opened(store) as writer, opened(store) as reader:
                content = page(1, size)
                for number in range(20):
                    write = asyncio.create_task(put(writer, object_name(number), content))
                    outcome = ReadOutcome.MISSING
                    while outcome is ReadOutcome.MISSING:
                        outcome, buffer = await get(reader, object_name(number), size)
                        if outcome is ReadOutcome.OK:
                            assert buffer == content
                        await asyncio.sleep(0)
                    assert outcome is ReadOutcome.OK
                    assert await write is WriteOutcome.OK

        run(scenario())

    def test_s6_the_first_writer_wins_and_a_later_one_learns_it(
        self, store: StoreUnderTest
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as first, opened(store) as second:
                assert await put(first, object_name(1), page(1)) is WriteOutcome.OK
                assert await put(first, object_name(1), page(2)) is WriteOutcome.PRESENT
                assert await put(second, object_name(1), page(3)) is WriteOutcome.PRESENT
                assert await get(second, object_name(1)) == (ReadOutcome.OK, page(1))

        run(scenario())

    def test_s6_of_many_writers_at_once_exactly_one_wins(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as first, opened(store) as second:
                for number in range(10):
                    outcomes = await asyncio.gather(
                        *(
                            put((first, second)[each % 2], object_name(number), page(each))
                            for each in range(6)
                        )
                    )
                    assert sorted(outcomes) == [WriteOutcome.OK] + [WriteOutcome.PRESENT] * 5
                    winner = outcomes.index(WriteOutcome.OK)
                    assert await get(first, object_name(number)) == (ReadOutcome.OK, page(winner))

        run(scenario())

    def test_s7_existence_may_be_out_of_date_until_a_read_decides(
        self, store: StoreUnderTest
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend, opened(store) as other:
                await put(backend, object_name(1), page(1))
                assert await backend.exists([object_name(1)], deadline=soon()) == [True]
                assert await other.remove([object_name(1)], deadline=soon()) == [True]
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
                assert await backend.exists([object_name(1)], deadline=soon()) == [False]

        run(scenario())

    @pytest.mark.parametrize("present", range(EVERY + 1))
    def test_s8_a_page_with_optional_columns_comes_back_as_it_was_written(
        self, store: StoreUnderTest, present: int
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                assert await put_columns(backend, object_name(1), present) is WriteOutcome.OK
                assert await get_columns(backend, object_name(1), present) == (
                    ReadOutcome.OK,
                    full_page(present),
                )

        run(scenario())

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_s8_a_reader_gets_what_it_asks_for_out_of_an_object_that_has_more(
        self, store: StoreUnderTest, nbytes: int
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put_columns(backend, object_name(1), EVERY, nbytes=nbytes)
                for asked in range(EVERY + 1):
                    assert await get_columns(backend, object_name(1), asked, nbytes) == (
                        ReadOutcome.OK,
                        full_page(asked, nbytes=nbytes),
                    )

        run(scenario())

    @pytest.mark.parametrize("present", range(EVERY + 1))
    def test_s8_an_object_that_lacks_a_column_is_a_miss_which_is_counted_apart(
        self, store: StoreUnderTest, present: int
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put_columns(backend, object_name(1), present)
                too_much = [asked for asked in range(EVERY + 1) if asked & ~present]
                for asked in too_much:
                    outcome, _ = await get_columns(backend, object_name(1), asked)
                    assert outcome is ReadOutcome.LACKING
                seen = backend.counters()
                assert (seen.reads_lacking, seen.reads_missing) == (len(too_much), 0)
                assert await get_columns(backend, object_name(1), present) == (
                    ReadOutcome.OK,
                    full_page(present),
                )

        run(scenario())

    @pytest.mark.parametrize("asked", [0, 0b001, 0b110])
    def test_s8_a_bit_that_is_wrong_in_a_column_nobody_asked_for_is_found(
        self, store: StoreUnderTest, asked: int
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put_columns(backend, object_name(1), EVERY)
                at = 16 * KIB + (5000 if asked == 0b001 else 10)
                store.spoil(object_name(1), at)
                assert (await get_columns(backend, object_name(1), asked))[0] is ReadOutcome.CORRUPT
                assert (await get_columns(backend, object_name(1), asked))[0] is ReadOutcome.MISSING

        run(scenario())

    def test_s8_a_fuller_object_takes_the_place_of_one_that_lacks_columns(
        self, store: StoreUnderTest
    ) -> None:
        name = object_name(1)

        async def scenario() -> None:
            async with opened(store) as lean, opened(store) as full:
                assert await put_columns(lean, name, 0, author=1) is WriteOutcome.OK
                assert await put_columns(full, name, EVERY, author=2) is WriteOutcome.OK
                assert await put_columns(lean, name, 0, author=3) is WriteOutcome.PRESENT
                assert await put_columns(full, name, EVERY, author=4) is WriteOutcome.PRESENT
                assert await put_columns(full, name, 0b010, author=5) is WriteOutcome.PRESENT
                for asked in (0, 0b101, EVERY):
                    assert await get_columns(lean, name, asked) == (
                        ReadOutcome.OK,
                        full_page(asked, author=2),
                    )

        run(scenario())

    def test_s8_columns_that_two_writers_bring_come_together_in_one_object(
        self, store: StoreUnderTest
    ) -> None:
        name = object_name(1)

        async def scenario() -> None:
            async with opened(store) as first, opened(store) as second:
                await put_columns(first, name, 0b001, author=1)
                assert await put_columns(second, name, 0b110, author=2) is WriteOutcome.OK
                outcome, both = await get_columns(first, name, EVERY)
                assert outcome is ReadOutcome.OK
                assert both[: 16 * KIB] == page(2)
                assert both[16 * KIB : 20 * KIB] == page(10, OPTIONAL_BYTES[0])
                assert both[20 * KIB :] == full_page(0b110, author=2)[16 * KIB :]

        run(scenario())

    def test_s8_what_is_not_sound_is_not_carried_over_into_a_fuller_object(
        self, store: StoreUnderTest
    ) -> None:
        name = object_name(1)

        async def scenario() -> None:
            async with opened(store) as backend:
                await put_columns(backend, name, 0b001)
                store.spoil(name, 17 * KIB)
                assert await put_columns(backend, name, 0b010) is WriteOutcome.OK
                assert (await get_columns(backend, name, 0b011))[0] is ReadOutcome.LACKING
                assert await get_columns(backend, name, 0b010) == (
                    ReadOutcome.OK,
                    full_page(0b010),
                )

        run(scenario())

    def test_s8_a_reader_finds_a_whole_object_all_the_time_that_it_is_replaced(
        self, store: StoreUnderTest
    ) -> None:
        size = 1 << 20

        async def scenario() -> None:
            async with opened(store) as writer, opened(store) as reader:
                contents = [full_page(0, author, size) for author in range(4)]
                for number in range(5):
                    name = object_name(number)
                    await put_columns(writer, name, 0, 0, size)
                    for author, present in ((1, 0b001), (2, 0b011), (3, EVERY)):
                        write = asyncio.create_task(
                            put_columns(writer, name, present, author, size)
                        )
                        while not write.done():
                            outcome, buffer = await get_columns(reader, name, 0, size)
                            assert outcome is ReadOutcome.OK
                            assert buffer in contents[author - 1 : author + 1]
                            await asyncio.sleep(0)
                        assert await write is WriteOutcome.OK

        run(scenario())

    def test_s8_of_many_writers_at_once_no_column_is_lost(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as first, opened(store) as second:
                for number in range(10):
                    name = object_name(number)
                    outcomes = await asyncio.gather(
                        *(
                            put_columns((first, second)[each % 2], name, present)
                            for each, present in enumerate((0, 0b001, 0b010, 0b100, 0b001, 0))
                        )
                    )
                    assert set(outcomes) <= {WriteOutcome.OK, WriteOutcome.PRESENT}
                    for asked in range(EVERY + 1):
                        assert await get_columns(first, name, asked) == (
                            ReadOutcome.OK,
                            full_page(asked),
                        )

        run(scenario())

    @pytest.mark.parametrize(
        "other", [(), (4 * KIB,), (4 * KIB, 4 * KIB, 9000), (9001, 4 * KIB)], ids=str
    )
    def test_s8_an_object_in_other_optional_columns_than_the_layout_s_is_never_served(
        self, store: StoreUnderTest, other: tuple[int, ...]
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put_columns(backend, object_name(1), EVERY)
                optional = OptionalColumns(nbytes=other)
                outcome, _ = await get(backend, object_name(1), optional=optional)
                assert outcome is ReadOutcome.CORRUPT

        run(scenario())

    def test_a_removed_name_is_free_again(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                names = [object_name(1), object_name(2)]
                assert await backend.remove(names, deadline=soon()) == [True, True]
                assert await backend.exists(names, deadline=soon()) == [False, False]
                assert await put(backend, object_name(1), page(3)) is WriteOutcome.OK
                assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(3))

        run(scenario())

    def test_the_counters_tell_what_was_seen(self, store: StoreUnderTest) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                await put(backend, object_name(1), page(1))
                await get(backend, object_name(1))
                await get(backend, object_name(2))
                seen = backend.counters()
                assert (seen.writes_ok, seen.writes_present, seen.writes_failed) == (1, 1, 0)
                assert (seen.reads_ok, seen.reads_missing, seen.reads_corrupt) == (1, 1, 0)
                assert (seen.bytes_read, seen.bytes_written) == (16 * KIB, 16 * KIB)

        run(scenario())

    def test_closing_twice_is_closing_once_and_a_closed_store_answers_failed(
        self, store: StoreUnderTest
    ) -> None:
        async def scenario() -> None:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1))
                await backend.close()
                await backend.close()
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
                assert await put(backend, object_name(2), page(2)) is WriteOutcome.FAILED
                assert await backend.exists([object_name(1)], deadline=soon()) == [False]
                assert await backend.remove([object_name(1)], deadline=soon()) == [False]

        run(scenario())
