"""Tests of the contract's promises about parts of objects (S8), part of `StorageContract`."""

from collections.abc import Sequence
from itertools import chain, combinations

import pytest

from lockstep.errors import UsageError
from lockstep.page_format.object_header import PIECE_BYTES
from lockstep.page_format.object_shape import ObjectShape, Part
from lockstep.storage_backends.base import (
    Read,
    ReadOutcome,
    StorageBackend,
    StoredObject,
    WriteOutcome,
)
from tests.kit.storage.calls import (
    KIB,
    Found,
    StoreUnderTest,
    columns,
    cut,
    get,
    listed,
    object_name,
    opened,
    page,
    put,
    put_columns,
    soon,
)

SMALL = (4 * KIB, 5001, 1, 4 * KIB, 8 * KIB)
ALIGNED = (4 * KIB, 8 * KIB, 4 * KIB, 4 * KIB)
LARGE = (PIECE_BYTES - 1, 2, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7, 4 * KIB)
"""Sizes of parts in bytes, such that parts end a few bytes before or after the ends of payload
pieces."""


def shape_of(sizes: tuple[int, ...], held: tuple[int, ...] | None = None) -> ObjectShape:
    """Return a shape with parts of these sizes; `held` are the numbers of the caller's parts.

    By default the caller has all parts.
    """
    parts = tuple(Part(nbytes) for nbytes in sizes)
    return ObjectShape(parts, tuple(range(len(sizes))) if held is None else held)


def subsets(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return every non-empty subset of the parts' numbers."""
    numbers = range(len(sizes))
    return list(chain.from_iterable(combinations(numbers, n) for n in range(1, len(sizes) + 1)))


def parts_of_page(sizes: tuple[int, ...], held: tuple[int, ...], number: int = 1) -> bytearray:
    """Return the bytes of the parts `held`, cut from the whole page."""
    content = page(number, sum(sizes))
    return bytearray(b"".join(content[sum(sizes[:each]) : sum(sizes[: each + 1])] for each in held))


def somewhere(nbytes: int) -> list[int]:
    """Return offsets at which a test splits a buffer; some of the resulting buffers are empty."""
    return sorted([0, nbytes // 3, nbytes // 3, min(nbytes, nbytes // 3 + 1), nbytes * 3 // 4])


async def listed_if_it_can(backend: StorageBackend) -> list[StoredObject]:
    """List a store's objects. If the store does not support listing, check its error; return []."""
    if backend.capabilities.lists:
        return await listed(backend)
    with pytest.raises(UsageError):
        await listed(backend)
    return []


class PartsContract:
    """A reader gets only the parts that it requests. The store verifies each part separately."""

    @pytest.mark.parametrize("sizes", [SMALL, ALIGNED, LARGE], ids=["small", "aligned", "large"])
    async def test_s8_a_read_of_some_parts_gives_exactly_these(
        self, store: StoreUnderTest, sizes: tuple[int, ...]
    ) -> None:
        async with opened(store) as backend:
            content = page(1, sum(sizes))
            assert await put(backend, object_name(1), content, shape_of(sizes)) is (WriteOutcome.OK)
            shapes = [shape_of(sizes, held) for held in subsets(sizes)]
            wanted = [(ReadOutcome.OK, parts_of_page(sizes, held)) for held in subsets(sizes)]
            assert [await get(backend, object_name(1), shape) for shape in shapes] == wanted

    async def test_s8_a_part_without_bytes_may_be_asked_for_or_left_out(
        self, store: StoreUnderTest
    ) -> None:
        sizes = (4 * KIB, 0, 4 * KIB)
        requested = [(0, 2), (0, 1, 2), (1,), (0, 1), (0,), (2,)] * 2

        async with opened(store) as backend:
            await put(backend, object_name(1), page(1, sum(sizes)), shape_of(sizes))
            read = [await get(backend, object_name(1), shape_of(sizes, held)) for held in requested]
            assert read == [(ReadOutcome.OK, parts_of_page(sizes, held)) for held in requested]

    async def test_s8_one_call_reads_other_parts_of_each_object(
        self, store: StoreUnderTest
    ) -> None:
        wanted = subsets(SMALL)

        async with opened(store) as backend:
            for number in range(len(wanted)):
                await put(backend, object_name(number), page(number, sum(SMALL)), shape_of(SMALL))
            shapes = [shape_of(SMALL, held) for held in wanted]
            contents = [bytearray(shape.nbytes) for shape in shapes]
            reads = [
                Read(object_name(number), cut(content, somewhere(len(content))), shape)
                for number, (content, shape) in enumerate(zip(contents, shapes, strict=True))
            ]
            assert set(await backend.read(reads, deadline=soon())) == {ReadOutcome.OK}
            assert contents == [
                parts_of_page(SMALL, held, number) for number, held in enumerate(wanted)
            ]

    @pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
    async def test_s8_a_bit_that_is_wrong_is_found_by_whoever_wants_its_part(
        self, store: StoreUnderTest, sizes: tuple[int, ...]
    ) -> None:
        numbers = range(len(sizes))
        others = [tuple(each for each in numbers if each != number) for number in numbers]

        async with opened(store) as backend:
            for number in numbers:
                await put(backend, object_name(number), page(number, sum(sizes)), shape_of(sizes))
                store.spoil(object_name(number), sum(sizes[:number]) + sizes[number] // 2)

            async def read(held: Sequence[tuple[int, ...]]) -> list[Found]:
                return [
                    await get(backend, object_name(n), shape_of(sizes, held[n])) for n in numbers
                ]

            assert await read(others) == [
                (ReadOutcome.OK, parts_of_page(sizes, others[number], number)) for number in numbers
            ]
            spoilt = await read([(number,) for number in numbers])
            assert [outcome for outcome, _ in spoilt] == [ReadOutcome.CORRUPT] * len(sizes)
            # After a read has found a corrupt part, later reads must not get the object's valid parts.
            assert [outcome for outcome, _ in await read(others)] == [ReadOutcome.MISSING] * len(
                sizes
            )

    async def test_s8_an_object_in_other_parts_is_never_served(self, store: StoreUnderTest) -> None:
        others = {
            "one part": shape_of((sum(SMALL),)),
            "joined": shape_of((*SMALL[:3], SMALL[3] + SMALL[4])),
            "in another order": shape_of((SMALL[1], SMALL[0], *SMALL[2:])),
            "one without bytes more": shape_of((*SMALL, 0)),
            "one more": shape_of((*SMALL, 1)),
            "one fewer": shape_of(SMALL[:-1]),
            "one optional": ObjectShape(
                (*shape_of(SMALL[:-1]).parts, Part(SMALL[-1], 0)), (0, 1, 2, 3)
            ),
        }
        names = {what: object_name(number) for number, what in enumerate(others)}

        async with opened(store) as backend:
            for name in names.values():
                await put(backend, name, page(1, sum(SMALL)), shape_of(SMALL))
            first = {what: await get(backend, names[what], shape) for what, shape in others.items()}
            then = {what: await get(backend, names[what], shape_of(SMALL)) for what in others}

        assert {what: outcome for what, (outcome, _) in first.items()} == dict.fromkeys(
            others, ReadOutcome.CORRUPT
        )
        assert {what: outcome for what, (outcome, _) in then.items()} == dict.fromkeys(
            others, ReadOutcome.MISSING
        )

    async def test_a_store_that_lists_tells_what_was_written_with_names_and_parts(
        self, store: StoreUnderTest
    ) -> None:
        optional = columns(0b101)
        written = {
            object_name(1): tuple(Part(nbytes) for nbytes in SMALL),
            object_name(2): tuple(optional.parts[each] for each in optional.held),
            object_name(3, "window"): (Part(16 * KIB),),
        }

        async with opened(store) as backend:
            assert await listed_if_it_can(backend) == []
            await put(backend, object_name(1), page(1, sum(SMALL)), shape_of(SMALL))
            await put_columns(backend, object_name(2), 0b101)
            await put(backend, object_name(3, "window"), page(3))
            await put(backend, object_name(4), page(4))
            assert await backend.remove([object_name(4)], deadline=soon()) == [True]
            stored = await listed_if_it_can(backend)
            expected = written if backend.capabilities.lists else {}
            assert {each.name: each.shape.parts for each in stored} == expected
            assert len(stored) == len(expected)
            assert all(each.shape.is_whole for each in stored)
            assert all(each.age_s is None or each.age_s >= 0 for each in stored)
            read = [await get(backend, each.name, each.shape) for each in stored]
            assert {outcome for outcome, _ in read} <= {ReadOutcome.OK}
