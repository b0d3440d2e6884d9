"""Tests of the contract's promises about optional columns (S8), part of `StorageContract`."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import chain, pairwise
from typing import Any

import pytest

from lockstep.page_format.object_shape import ObjectShape, Part
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from tests.kit.storage.calls import (
    EVERY,
    KIB,
    OPTIONAL_BYTES,
    SIZES,
    Found,
    StoreUnderTest,
    found,
    full_page,
    get,
    get_columns,
    object_name,
    opened,
    page,
    put,
    put_columns,
)

CHOICES = range(EVERY + 1)
"""Presence bits of every subset of the optional columns."""


async def seen_during(
    call: Coroutine[Any, Any, WriteOutcome], look: Callable[[], Awaitable[Found]]
) -> tuple[WriteOutcome, set[tuple[ReadOutcome, bytes]]]:
    """Call `look` repeatedly during a write; return the write's outcome and all results of `look`."""
    task, seen = asyncio.create_task(call), set[tuple[ReadOutcome, bytes]]()
    while not task.done():
        outcome, content = await look()
        seen.add((outcome, bytes(content)))
        await asyncio.sleep(0)
    return await task, seen


class ColumnsContract:
    """A stored object keeps all columns that any writer wrote; a later write only adds columns."""

    races = 10
    """Number of races between writers in a test. Subclasses lower it for slow stores."""

    @pytest.mark.parametrize("nbytes", SIZES)
    async def test_s8_a_reader_gets_what_it_asks_for_out_of_an_object_that_has_more(
        self, store: StoreUnderTest, nbytes: int
    ) -> None:
        async with opened(store) as backend:
            await put_columns(backend, object_name(1), EVERY, nbytes=nbytes)
            assert [
                await get_columns(backend, object_name(1), wanted, nbytes) for wanted in CHOICES
            ] == [(ReadOutcome.OK, full_page(wanted, nbytes=nbytes)) for wanted in CHOICES]

    async def test_s8_an_object_that_lacks_a_column_is_a_miss_of_its_own_kind(
        self, store: StoreUnderTest
    ) -> None:
        lacking = [
            (present, wanted) for present in CHOICES for wanted in CHOICES if wanted & ~present
        ]

        async with opened(store) as backend:
            for present in CHOICES:
                await put_columns(backend, object_name(present), present)
            read = [
                await get_columns(backend, object_name(each), wanted) for each, wanted in lacking
            ]
            assert [outcome for outcome, _ in read] == [ReadOutcome.LACKING] * len(lacking)
            assert [await get_columns(backend, object_name(each), each) for each in CHOICES] == [
                (ReadOutcome.OK, full_page(each)) for each in CHOICES
            ]

    async def test_s8_a_fuller_object_takes_the_place_of_one_that_lacks_columns(
        self, store: StoreUnderTest
    ) -> None:
        name = object_name(1)

        async with opened(store) as lean, opened(store) as full:
            assert await put_columns(lean, name, 0, author=1) is WriteOutcome.OK
            assert await put_columns(full, name, EVERY, author=2) is WriteOutcome.OK
            assert await put_columns(lean, name, 0, author=3) is WriteOutcome.PRESENT
            assert await put_columns(full, name, EVERY, author=4) is WriteOutcome.PRESENT
            assert await put_columns(full, name, 0b010, author=5) is WriteOutcome.PRESENT
            assert [await get_columns(lean, name, wanted) for wanted in (0, 0b101, EVERY)] == [
                (ReadOutcome.OK, full_page(wanted, author=2)) for wanted in (0, 0b101, EVERY)
            ]

    async def test_s8_columns_that_two_writers_bring_come_together_in_one_object(
        self, store: StoreUnderTest
    ) -> None:
        name = object_name(1)

        async with opened(store) as first, opened(store) as second:
            await put_columns(first, name, 0b001, author=1)
            assert await put_columns(second, name, 0b110, author=2) is WriteOutcome.OK
            outcome, both = await get_columns(first, name, EVERY)
            assert outcome is ReadOutcome.OK
            assert both[: 16 * KIB] == page(2)
            assert both[16 * KIB : 20 * KIB] == page(10, OPTIONAL_BYTES[0])
            assert both[20 * KIB :] == full_page(0b110, author=2)[16 * KIB :]

    async def test_s8_a_column_without_bytes_is_a_column_like_the_others(
        self, store: StoreUnderTest
    ) -> None:
        parts = (Part(16 * KIB), Part(0, 0))
        without, having = ObjectShape(parts, (0,)), ObjectShape(parts, (0, 1))
        name = object_name(1)

        async with opened(store) as backend:
            assert await put(backend, name, page(1), without) is WriteOutcome.OK
            assert (await get(backend, name, having))[0] is ReadOutcome.LACKING
            assert await put(backend, name, page(1), having) is WriteOutcome.OK
            assert await put(backend, name, page(1), having) is WriteOutcome.PRESENT
            assert await put(backend, name, page(1), without) is WriteOutcome.PRESENT
            read = [await get(backend, name, shape) for shape in (having, without)]
            assert read == found((1, 1))

    async def test_s8_what_is_not_sound_is_not_carried_over_into_a_fuller_object(
        self, store: StoreUnderTest
    ) -> None:
        name = object_name(1)

        async with opened(store) as backend:
            await put_columns(backend, name, 0b001)
            store.spoil(name, 17 * KIB)
            assert await put_columns(backend, name, 0b010) is WriteOutcome.OK
            assert (await get_columns(backend, name, 0b011))[0] is ReadOutcome.LACKING
            assert await get_columns(backend, name, 0b010) == (ReadOutcome.OK, full_page(0b010))

    async def test_s8_a_reader_finds_a_whole_object_all_the_time_that_it_is_replaced(
        self, store: StoreUnderTest
    ) -> None:
        size, names = 1 << 20, [object_name(number) for number in range(5)]
        contents = [(ReadOutcome.OK, bytes(full_page(0, author, size))) for author in range(4)]

        async with opened(store) as writer, opened(store) as reader:
            results: list[tuple[WriteOutcome, set[tuple[ReadOutcome, bytes]]]] = []
            for name in names:
                await put_columns(writer, name, 0, 0, size)
                for author, present in ((1, 0b001), (2, 0b011), (3, EVERY)):
                    write = put_columns(writer, name, present, author, size)
                    results.append(
                        await seen_during(write, lambda: get_columns(reader, name, 0, size))
                    )
            assert [outcome for outcome, _ in results] == [WriteOutcome.OK] * 15
            either = [set(pair) for pair in pairwise(contents)] * 5
            assert all(seen <= two for (_, seen), two in zip(results, either, strict=True))

    async def test_s8_of_many_writers_at_once_no_column_is_lost(
        self, store: StoreUnderTest
    ) -> None:
        names = [object_name(number) for number in range(self.races)]

        async with opened(store) as first, opened(store) as second:
            results = [
                await asyncio.gather(
                    *(
                        put_columns((first, second)[each % 2], name, present)
                        for each, present in enumerate((0, 0b001, 0b010, 0b100, 0b001, 0))
                    )
                )
                for name in names
            ]
            assert set(chain.from_iterable(results)) <= {WriteOutcome.OK, WriteOutcome.PRESENT}
            read = [await get_columns(first, name, wanted) for name in names for wanted in CHOICES]
            assert read == [(ReadOutcome.OK, full_page(wanted)) for wanted in CHOICES] * self.races
