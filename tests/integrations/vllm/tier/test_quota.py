"""A namespace keeps no more than its quota, and what leaves was used longest ago."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.vllm.tier.quota import NamespaceQuota
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.base import (
    Capabilities,
    ReadOutcome,
    StoredObject,
    Write,
    WriteOutcome,
)
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.registry import make_backend
from tests.kit.storage.calls import (
    get_many,
    listed,
    object_name,
    outcomes_of,
    put,
    put_each,
    put_many,
    run,
    using,
)

NAMESPACE = object_name(1).namespace
PAGE = 4096
STORED = HEADER_BYTES + PAGE
OK, MISSING = ReadOutcome.OK, ReadOutcome.MISSING


@asynccontextmanager
async def quota_of(pages: int, shelf: Shelf) -> AsyncGenerator[NamespaceQuota]:
    async with using(NamespaceQuota(MemoryBackend(shelf), NAMESPACE, pages * STORED)) as quota:
        yield quota


async def put_in_turn(quota: NamespaceQuota, numbers: Iterable[int]) -> None:
    """Write pages in calls of their own."""
    for number in numbers:
        await put_many(quota, [number], PAGE)


def test_what_was_written_longest_ago_leaves_for_what_is_new() -> None:
    async def scenario() -> tuple[list[ReadOutcome], int]:
        async with quota_of(3, Shelf()) as quota:
            await put_in_turn(quota, range(5))
            return await outcomes_of(quota, range(5), PAGE), quota.held_bytes

    assert run(scenario()) == ([MISSING, MISSING, OK, OK, OK], 3 * STORED)


def test_what_was_read_stays_longer() -> None:
    async def scenario() -> list[ReadOutcome]:
        async with quota_of(3, Shelf()) as quota:
            await put_in_turn(quota, range(3))
            await get_many(quota, [0], PAGE)
            await put_in_turn(quota, [3])
            return await outcomes_of(quota, range(4), PAGE)

    assert run(scenario()) == [OK, MISSING, OK, OK]


def test_of_a_call_that_is_larger_than_the_quota_only_what_fits_is_written() -> None:
    async def scenario() -> tuple[list[WriteOutcome], int]:
        async with quota_of(2, Shelf()) as quota:
            return await put_many(quota, range(4), PAGE), quota.held_bytes

    written, held = run(scenario())

    assert written == [WriteOutcome.OK] * 2 + [WriteOutcome.FAILED] * 2
    assert held == 2 * STORED


def test_what_is_there_already_takes_no_room() -> None:
    async def scenario() -> tuple[list[WriteOutcome], list[ReadOutcome], int]:
        async with quota_of(2, Shelf()) as quota:
            await put_in_turn(quota, range(2))
            again = await put_many(quota, range(2), PAGE)
            return again, await outcomes_of(quota, range(2), PAGE), quota.held_bytes

    assert run(scenario()) == ([WriteOutcome.PRESENT] * 2, [OK, OK], 2 * STORED)


def test_what_earlier_processes_have_left_counts() -> None:
    shelf = Shelf()

    async def scenario() -> tuple[int, list[ReadOutcome]]:
        async with quota_of(9, shelf) as quota:
            await put_in_turn(quota, range(4))
        async with quota_of(4, shelf) as later:
            held = later.held_bytes
            await put_in_turn(later, [9])
            return held, await outcomes_of(later, [0, 1, 2, 3, 9], PAGE)

    held, outcomes = run(scenario())

    assert held == 4 * STORED
    assert (outcomes.count(MISSING), outcomes[-1]) == (1, OK)


def test_a_store_that_has_more_than_the_quota_is_brought_down_by_the_next_write() -> None:
    shelf = Shelf()

    async def scenario() -> tuple[int, int]:
        async with using(MemoryBackend(shelf)) as store:
            await put_many(store, range(8), PAGE)
        async with quota_of(3, shelf) as quota:
            await put_in_turn(quota, [9])
            return quota.held_bytes, len(await listed(quota))

    assert run(scenario()) == (3 * STORED, 3)


def test_other_namespaces_stay_and_do_not_count() -> None:
    shelf = Shelf()
    other = ObjectName("cd" * 32, "ef" * 32, "kv", "all")

    async def scenario() -> tuple[int, set[str]]:
        async with using(MemoryBackend(shelf)) as store:
            await put(store, other, bytes(PAGE))
        async with quota_of(1, shelf) as quota:
            held = quota.held_bytes
            await put_in_turn(quota, range(3))
            return held, {each.name.namespace for each in await listed(quota)}

    assert run(scenario()) == (0, {NAMESPACE, other.namespace})


def test_what_others_write_counts_once_a_part_of_the_quota_was_written() -> None:
    shelf = Shelf()

    async def scenario() -> int:
        async with quota_of(16, shelf) as quota, using(MemoryBackend(shelf)) as other:
            await put_many(other, range(100, 110), PAGE)
            await put_in_turn(quota, range(2))
            await asyncio.sleep(0)
            await put_in_turn(quota, [2])
            return quota.held_bytes

    assert run(scenario()) == 13 * STORED


def test_what_others_have_removed_does_not_count_once_it_is_missed() -> None:
    shelf = Shelf()

    async def scenario() -> int:
        async with quota_of(4, shelf) as quota:
            await put_in_turn(quota, range(2))
            shelf.objects.clear()
            await outcomes_of(quota, [0], PAGE)
            return quota.held_bytes

    assert run(scenario()) == STORED


class ListsSlowly(MemoryBackend):
    """Once there is something, it tells what it saw only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.saw, self.may_tell = asyncio.Event(), asyncio.Event()

    async def objects(self) -> AsyncIterator[StoredObject]:
        found = [each async for each in super().objects()]
        if found:
            self.saw.set()
            await self.may_tell.wait()
        for each in found:
            yield each

    async def tell(self) -> None:
        self.may_tell.set()
        await asyncio.sleep(0)


class WritesSlowly(ListsSlowly):
    """What comes after the first write is written once a listing has seen what is there."""

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        if self.shelf.objects:
            await self.saw.wait()
        return await super().write(writes, deadline=deadline)


def test_what_leaves_while_the_store_is_listed_does_not_come_back() -> None:
    async def scenario() -> tuple[int, int]:
        store = ListsSlowly()
        async with using(NamespaceQuota(store, NAMESPACE, 3 * STORED)) as quota:
            await put_in_turn(quota, range(3))
            await store.saw.wait()
            await put_in_turn(quota, [3])
            await store.tell()
            return len(await listed(quota)), quota.held_bytes

    assert run(scenario()) == (3, 3 * STORED)


def test_what_is_written_while_the_store_is_listed_counts() -> None:
    async def scenario() -> int:
        store = WritesSlowly()
        async with using(NamespaceQuota(store, NAMESPACE, 3 * STORED)) as quota:
            await put_in_turn(quota, range(2))
            await store.tell()
            return quota.held_bytes

    assert run(scenario()) == 2 * STORED


def test_a_write_that_failed_takes_no_room() -> None:
    async def scenario() -> tuple[set[WriteOutcome], int]:
        failing = make_backend("fault+memory://?fault.error=1")
        async with using(NamespaceQuota(failing, NAMESPACE, 1 << 20)) as quota:
            return await put_each(quota, range(3)), quota.held_bytes

    assert run(scenario()) == ({WriteOutcome.FAILED}, 0)


def test_writes_at_the_same_time_keep_the_quota_together() -> None:
    async def scenario() -> int:
        async with quota_of(3, Shelf()) as quota:
            await asyncio.gather(*(put_many(quota, [each], PAGE) for each in range(12)))
            return len(await listed(quota))

    assert run(scenario()) == 3


def test_a_store_that_cannot_list_is_refused_by_name() -> None:
    class Silent(MemoryBackend):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(lists=False)

    async def scenario() -> None:
        await NamespaceQuota(Silent(), NAMESPACE, 1).open()

    with pytest.raises(ConfigError, match="quota_gib needs a store that can say what is in it"):
        run(scenario())
