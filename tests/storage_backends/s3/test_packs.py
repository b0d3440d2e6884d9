"""Several objects in one file of an object store: the contract, and what is special about packs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.kit.servers.redis_server import RedisServer
from tests.kit.storage.calls import (
    KIB,
    StoreUnderTest,
    digest_of,
    found,
    get,
    get_columns,
    get_many,
    listed,
    object_name,
    opened,
    outcomes_of,
    page,
    put,
    put_columns,
    put_many,
    soon,
    writing,
)
from tests.kit.storage.contract import StorageContract

pytest.importorskip("obstore", reason="needs the extra s3")
import obstore

from lockstep.errors import ConfigError, StorageError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.page_index.contract import Entry, Settings
from lockstep.storage_backends.page_index.opening import make_index
from lockstep.storage_backends.page_index.sqlite import SqlitePageIndex
from lockstep.storage_backends.s3.ranges import (
    GAP_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Range,
    join_ranges,
)
from tests.kit.storage.s3 import BucketStore, PackedStore

OBJECT_BYTES = HEADER_BYTES + 16 * KIB


@pytest.fixture
def store(packed: PackedStore) -> StoreUnderTest:
    return packed


class TestPackedS3Contract(StorageContract):
    """The suite, with up to eight objects to a file."""

    # Still more files than requests that may be in flight.
    large_batch = 300
    races = 4


async def test_one_call_s_pages_are_put_and_read_together(packed: PackedStore) -> None:
    async with packed.behind_proxy() as (backend, proxy):
        assert await put_many(backend, range(20)) == [WriteOutcome.OK] * 20
        assert proxy.requests == ["PUT"] * 3
        assert len(packed.paths()) == 3
        proxy.forget()
        assert await get_many(backend, range(20)) == found(range(20))
        assert proxy.requests == ["GET"] * 3
        proxy.forget()
        names = [object_name(n) for n in range(30)]
        assert await backend.exists(names, deadline=soon()) == [True] * 20 + [False] * 10
        assert await put_many(backend, range(20)) == [WriteOutcome.PRESENT] * 20
        assert proxy.requests == []


async def test_one_page_of_a_file_is_read_without_the_others(packed: PackedStore) -> None:
    async with packed.behind_proxy() as (backend, proxy):
        await put_many(backend, range(8))
        proxy.forget()
        assert await get(backend, object_name(5)) == (ReadOutcome.OK, page(5))
        assert proxy.requests == ["GET"]
        assert proxy.bytes_back <= OBJECT_BYTES + 2 * KIB


async def test_of_an_object_without_a_wanted_column_only_the_header_is_read(
    packed: PackedStore,
) -> None:
    async with packed.behind_proxy() as (backend, proxy):
        await put_columns(backend, object_name(1), 0b001, nbytes=1 << 20)
        proxy.forget()
        outcome, _ = await get_columns(backend, object_name(1), 0b011, nbytes=1 << 20)
        assert outcome is ReadOutcome.LACKING
        assert proxy.bytes_back <= HEADER_BYTES + 2 * KIB


async def test_pools_and_shards_do_not_share_a_file(packed: PackedStore) -> None:
    async with opened(packed) as backend:
        names = [object_name(n, pool) for n in range(4) for pool in ("kv", "window")]
        await backend.write([writing(name, page(1)) for name in names], deadline=soon())
        assert len({packed.entry(name).place for name in names[::2]}) == 1
        assert len({packed.entry(name).place for name in names}) == 2


async def test_a_file_that_the_lifecycle_took_is_a_miss_and_its_rows_go(
    packed: PackedStore,
) -> None:
    async with opened(packed) as backend:
        await put_many(backend, range(8))
        obstore.delete(packed.bucket.client, packed.entry(object_name(0)).place)
        names = [object_name(n) for n in range(8)]
        assert await backend.exists(names, deadline=soon()) == [True] * 8
        assert await outcomes_of(backend, range(8)) == [ReadOutcome.MISSING] * 8
        assert await backend.exists(names, deadline=soon()) == [False] * 8
        assert await put_many(backend, range(8)) == [WriteOutcome.OK] * 8
        assert await get_many(backend, range(8)) == found(range(8))


async def test_a_bad_object_goes_and_its_neighbours_in_the_file_stay(packed: PackedStore) -> None:
    async with opened(packed) as backend:
        await put_many(backend, range(3))
        packed.spoil(object_name(1))
        good, bad = ReadOutcome.OK, ReadOutcome.CORRUPT
        assert await outcomes_of(backend, range(3)) == [good, bad, good]
        assert await outcomes_of(backend, range(3)) == [good, ReadOutcome.MISSING, good]
        assert sorted(each.name.key for each in await listed(backend)) == [
            object_name(0).key,
            object_name(2).key,
        ]


async def test_a_file_of_one_object_is_removed_with_it(packed: PackedStore) -> None:
    async with opened(packed) as backend:
        await put(backend, object_name(1), page(1))
        await put_many(backend, range(2, 4))
        names = [object_name(1), object_name(2)]
        assert await backend.remove(names, deadline=soon()) == [True, True]
        assert packed.paths() == [packed.entry(object_name(3)).place]


WRONG_ROWS: dict[str, Callable[[Entry], Entry]] = {
    "offset": lambda entry: entry._replace(offset=1),
    "offset-far": lambda entry: entry._replace(offset=1 << 49),
    "length": lambda entry: entry._replace(length=5),
    "length-huge": lambda entry: entry._replace(length=1 << 49),
    "place": lambda entry: entry._replace(place="objects/../../secret"),
    "place-gone": lambda entry: entry._replace(place="packs/00/" + "0" * 32 + "-8"),
}


@pytest.mark.parametrize("change", WRONG_ROWS.values(), ids=WRONG_ROWS.keys())
async def test_where_the_index_says_that_an_object_lies_is_not_believed(
    packed: PackedStore, change: Callable[[Entry], Entry]
) -> None:
    async with opened(packed) as backend:
        await put_many(backend, range(3))
        packed.put_entry(object_name(1), change(packed.entry(object_name(1))))
        before, misplaced, behind = await outcomes_of(backend, range(3))
        assert (before, behind) == (ReadOutcome.OK, ReadOutcome.OK)
        assert misplaced in (ReadOutcome.CORRUPT, ReadOutcome.MISSING)
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING


async def test_which_columns_an_object_has_is_what_it_says_itself(packed: PackedStore) -> None:
    async with opened(packed) as backend:
        await put_many(backend, range(3))
        packed.put_entry(object_name(1), packed.entry(object_name(1))._replace(present=7))
        assert await get_many(backend, range(3)) == found(range(3))


async def test_of_many_writers_of_the_same_pages_one_wins_each(packed: PackedStore) -> None:
    async with opened(packed) as first, opened(packed) as second:
        calls = [put_many((first, second)[each % 2], range(12)) for each in range(4)]
        told = await asyncio.gather(*calls)
        one_wins = [WriteOutcome.OK] + [WriteOutcome.PRESENT] * 3
        assert [sorted(outcomes) for outcomes in zip(*told, strict=True)] == [one_wins] * 12
        assert await get_many(first, range(12)) == found(range(12))


async def test_a_writer_that_dies_before_it_commits_leaves_nothing_to_see(
    packed: PackedStore,
) -> None:
    async with packed.behind_proxy() as (backend, proxy), opened(packed) as other:
        proxy.hang = True
        proxy.asked.clear()
        call = asyncio.create_task(put_many(backend, range(4)))
        await proxy.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await outcomes_of(other, range(4)) == [ReadOutcome.MISSING] * 4
        assert await put_many(other, range(4)) == [WriteOutcome.OK] * 4


async def test_many_nodes_may_share_an_index_in_redis(
    packed: PackedStore, redis_server: RedisServer
) -> None:
    packed.options = f"&index={quote(redis_server.url())}&pack=4"

    async with opened(packed) as first, opened(packed) as second:
        assert await put_many(first, range(6)) == [WriteOutcome.OK] * 6
        assert (
            await put_many(second, range(8)) == [WriteOutcome.PRESENT] * 6 + [WriteOutcome.OK] * 2
        )
        read = [await get_many(backend, range(8)) for backend in (first, second)]
        assert read == [found(range(8))] * 2
        assert len(await listed(second)) == 8


async def test_writes_go_on_after_redis_has_lost_everything(
    packed: PackedStore, redis_server: RedisServer
) -> None:
    packed.options = f"&index={quote(redis_server.url())}&pack=4"

    async with opened(packed) as first, opened(packed) as second:
        assert await put_many(first, range(4)) == [WriteOutcome.OK] * 4
        redis_server.kill()
        assert await put_many(first, range(4, 6)) == [WriteOutcome.FAILED] * 2
        redis_server.start()
        assert await put_many(first, range(6)) == [WriteOutcome.OK] * 6
        assert await put_many(second, range(6, 9)) == [WriteOutcome.OK] * 3
        assert await get_many(second, range(9)) == found(range(9))
    async with opened(packed) as later:
        assert await put_many(later, range(9)) == [WriteOutcome.PRESENT] * 9


async def test_an_index_that_was_lost_and_taken_by_another_store_is_not_written_to(
    packed: PackedStore, redis_server: RedisServer
) -> None:
    packed.options = f"&index={quote(redis_server.url(1))}&pack=4"

    async with opened(packed) as backend:
        assert await put_many(backend, range(2)) == [WriteOutcome.OK] * 2
        redis_server.kill()
        redis_server.start()
        place = f"{packed.bucket.bucket}/{packed.bucket.prefix}"
        index = make_index(redis_server.url(1), place)
        index.open()
        index.agree(Settings(slot_bytes=1 << 20, file_slots=8))
        assert index.identity("a stranger") == "a stranger"
        assert await put_many(backend, range(2)) == [WriteOutcome.FAILED] * 2
        assert index.look_up([digest_of(object_name(0))]) == [None]
        index.close()


async def test_a_listing_that_could_not_read_one_object_is_an_error_and_not_shorter(
    packed: PackedStore,
) -> None:
    async with packed.behind_proxy() as (backend, proxy):
        await put_many(backend, range(9))
        bad = packed.entry(object_name(8)).place
        proxy.refuses = lambda path: bad in path
        with pytest.raises(StorageError, match=f"could not be listed: GET {bad}"):
            await listed(backend)
        proxy.refuses = lambda _: False
        assert len(await listed(backend)) == 9
        obstore.delete(packed.bucket.client, bad)
        assert len(await listed(backend)) == 8


async def test_a_bit_that_changes_on_the_way_costs_no_row(packed: PackedStore) -> None:
    async with packed.behind_proxy() as (backend, proxy):
        await put_many(backend, range(3))
        proxy.flips = 1
        assert await get_many(backend, range(3)) == found(range(3))
        assert not proxy.flips
        assert len(await listed(backend)) == 3


async def test_an_index_of_another_store_is_refused(packed: PackedStore, tmp_path: Path) -> None:
    async with opened(packed):
        pass
    stranger = BucketStore(packed.bucket.endpoint, packed.bucket.bucket, "elsewhere")
    with pytest.raises(ConfigError, match=r"belongs to s3://.*/kv/pages"):
        await stranger.backend(options=packed.options).open()
    occupied = tmp_path / "directory"
    occupied.mkdir()
    with pytest.raises(ConfigError, match="directory"):
        await stranger.backend(options=f"&index=sqlite://{occupied}").open()


async def test_an_index_that_stops_answering_is_a_failure(
    packed: PackedStore,
) -> None:
    async with opened(packed) as backend:
        await put_many(backend, range(2))
        for index in opened_indexes(backend):
            index.close()
        assert (await get(backend, object_name(0)))[0] is ReadOutcome.FAILED
        assert await put(backend, object_name(3), page(3)) is WriteOutcome.FAILED
        assert await backend.exists([object_name(7)], deadline=soon()) == [False]
        assert await backend.remove([object_name(0)], deadline=soon()) == [False]


def opened_indexes(backend: object) -> list[SqlitePageIndex]:
    return [backend.layout.index._index]  # type: ignore[attr-defined] # Its inside is broken here.


def test_ranges_are_joined_where_a_request_costs_more_than_the_gap() -> None:
    near, far = GAP_BYTES_MAX, GAP_BYTES_MAX + 1
    assert join_ranges([Range(10 + near, 20 + near), Range(0, 10)]) == [Range(0, 20 + near)]
    assert join_ranges([Range(0, 10), Range(10 + far, 20 + far)]) == [
        Range(0, 10),
        Range(10 + far, 20 + far),
    ]
    assert join_ranges([Range(0, 10), Range(5, 7), Range(10, 12)]) == [Range(0, 12)]
    large = Range(0, REQUEST_BYTES_MAX)
    assert join_ranges([large, Range(large.end + 1, large.end + 9)])[0] == large
    assert join_ranges([]) == []
