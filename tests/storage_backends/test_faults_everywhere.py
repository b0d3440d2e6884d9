"""Each kind of fault in every store that tests have besides `memory` and `file`.

The damage is done where the store's own check has to find it: under drawn faults not one wrong byte
is served, nothing hangs, and each fault is counted under its name, as `test_faults` claims
for the other two. A store fails alike for one seed, so the test's name says how to run it again.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from unittest.mock import ANY

import pytest

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from lockstep.storage_backends.damage.damage import DamageKind
from lockstep.storage_backends.mooncake import staged_reads as mooncake_staged
from lockstep.storage_backends.mooncake.memory import RegisteredMemory
from lockstep.storage_backends.s3 import ranges as s3_ranges
from lockstep.storage_backends.three_fs import reads as three_fs_reads
from tests.kit.servers.mooncake_master import MooncakeStore, a_store, brought_back, usable
from tests.kit.storage.by_name import (
    make_store,
)
from tests.kit.storage.calls import (
    EVERY,
    KIB,
    StoreUnderTest,
    eventually,
    found,
    full_page,
    get,
    get_columns,
    get_many,
    object_name,
    opened,
    page,
    put,
    put_columns,
    put_many,
    soon,
)
from tests.kit.storage.damaging import damaged
from tests.kit.storage.drill import Drill, check_counts
from tests.kit.storage.three_fs import small_store

FAULTS = {
    "3fs-sqlite": 200,
    "3fs-redis": 200,
    "3fs-usrbio": 200,
    "mooncake": 100,
    "mooncake-straight": 100,
    "s3": 50,
    "s3-packs": 50,
}
"""As many as take half a second; a request to the S3 server of the tests takes milliseconds."""
SLOW_TIMES = 50
"""A slow run has so many times the faults of a quick one."""


def anything(_: RegisteredMemory, views: Sequence[memoryview]) -> bool:
    return True


def whatever_is_there(*_: object) -> object:
    """Checksums that equal any others."""
    return ANY


@pytest.fixture(params=FAULTS)
def kind_of_store(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def store(
    kind_of_store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> StoreUnderTest:
    if kind_of_store == "mooncake-straight":
        # The buffers of these tests lie anywhere, and over TCP any memory will do.
        monkeypatch.setattr(RegisteredMemory, "covers", anything)
    return make_store(kind_of_store.removesuffix("-straight"), request)


class TestKinds:
    @pytest.mark.parametrize("kind", DamageKind)
    async def test_a_damaged_object_is_corrupt_once_and_then_missing(
        self, store: StoreUnderTest, kind: DamageKind
    ) -> None:
        async with opened(store) as backend:
            await put_many(backend, (1, 2, 3))
            assert await damaged(backend, kind)
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
            assert await get_many(backend, (2, 3)) == found((2, 3))
            assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))
            assert backend.counters().reads_corrupt == 1

    @pytest.mark.parametrize("nbytes", [1, 40 * KIB])
    async def test_the_bytes_of_a_shorter_or_longer_object_are_as_wrong_under_the_name(
        self, store: StoreUnderTest, nbytes: int
    ) -> None:
        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            await put(backend, object_name(2), page(2, nbytes))
            assert await damaged(backend, DamageKind.WRONG)
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
            assert await get(backend, object_name(2), nbytes) == (
                ReadOutcome.OK,
                page(2, nbytes),
            )

    async def test_an_object_that_has_got_more_columns_is_damaged_as_it_is_now(
        self, store: StoreUnderTest
    ) -> None:
        async with opened(store) as backend:
            for present in (0, 2):
                await put_columns(backend, object_name(1), present, author=1)
            assert await put_columns(backend, object_name(1), EVERY, author=1) is (WriteOutcome.OK)
            assert await get_columns(backend, object_name(1), EVERY) == (
                ReadOutcome.OK,
                full_page(EVERY),
            )
            assert await damaged(backend, DamageKind.TORN)
            assert (await get_columns(backend, object_name(1), EVERY))[0] is ReadOutcome.CORRUPT
            assert (await get_columns(backend, object_name(1), 0))[0] is ReadOutcome.MISSING

    async def test_no_damage_is_said_to_be_done_that_is_not(self, store: StoreUnderTest) -> None:
        async with opened(store) as backend:
            assert not any([await damaged(backend, kind) for kind in DamageKind])
            await put(backend, object_name(1), page(1))
            late = time.monotonic()
            assert not any([await damaged(backend, kind, deadline=late) for kind in DamageKind])
            # There is no other object whose bytes these could be.
            for_want_of_another = [
                await damaged(backend, DamageKind.WRONG, other=other) for other in (None, 1, 2)
            ]
            assert not any(for_want_of_another)
            assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))
        assert not await damaged(backend, DamageKind.FLIP)


class TestSlots:
    @pytest.mark.parametrize("kind", DamageKind)
    async def test_nothing_changes_but_the_bytes_of_one_slot(
        self, tmp_path: Path, kind: DamageKind
    ) -> None:
        store = small_store(tmp_path)

        def content() -> bytes:
            return b"".join(path.read_bytes() for path in sorted(store.root.glob("slots-*")))

        async with opened(store) as backend:
            await put_many(backend, range(6))
            entries = [store.entry(object_name(number)) for number in range(6)]
            entry, before = entries[1], content()
            assert await damaged(backend, kind)
            assert [store.entry(object_name(number)) for number in range(6)] == entries
            number = int(entry.place.removeprefix("slots-"))
            start = number * store.file_slots * store.slot_bytes + entry.offset
            end = start + HEADER_BYTES + entry.length
            after = content()
            assert before[start:end] != after[start:end]
            assert before[:start] == after[:start]
            assert before[end:] == after[end:]

    async def test_where_an_end_is_missing_every_byte_of_it_is_another_one(
        self, tmp_path: Path
    ) -> None:
        store = small_store(tmp_path)

        def raw() -> bytes:
            entry = store.entry(object_name(1))
            content = (store.root / entry.place).read_bytes()[entry.offset :]
            return content[: HEADER_BYTES + entry.length]

        async with opened(store) as backend:
            await put(backend, object_name(1), page(1))
            before = raw()
            assert await damaged(backend, DamageKind.SHORT)
            at = Random(7).randrange(len(before))
            after = raw()
            assert after[:at] == before[:at]
            assert all(a != b for a, b in zip(after[at:], before[at:], strict=True))


async def fill_up(backend: StorageBackend, nbytes: int) -> None:
    """Write pages of numbers from 3 on until there is no room for one."""
    number = 3
    while await put(backend, object_name(number), page(3, nbytes)) is WriteOutcome.OK:
        number += 1


class TestMooncake:
    async def test_an_object_is_damaged_while_somebody_has_a_lease_on_it(
        self, shared: MooncakeStore
    ) -> None:
        async with opened(shared) as backend, opened(shared) as reader:
            await put(backend, object_name(1), page(1))
            await put(backend, object_name(2), page(2))
            assert await get(reader, object_name(1)) == (ReadOutcome.OK, page(1))
            # The master refuses to remove what is leased, if nobody insists.
            assert shared.owner.remove(shared.key(object_name(1))) < 0
            assert await damaged(backend, DamageKind.WRONG)
            assert (await get(reader, object_name(1)))[0] is ReadOutcome.CORRUPT

    async def test_an_object_that_loses_all_its_bytes_keeps_one_and_is_corrupt(
        self, shared: MooncakeStore
    ) -> None:
        size = HEADER_BYTES + 1
        seed = next(seed for seed in range(1 << 20) if not Random(seed).randrange(size))

        async with opened(shared) as backend:
            await put(backend, object_name(1), page(1, 1))
            assert await damaged(backend, DamageKind.SHORT, seed=seed)
            assert len(shared.content(object_name(1))) == 1
            assert (await get(backend, object_name(1), 1))[0] is ReadOutcome.CORRUPT

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [DamageKind.FLIP, DamageKind.SHORT])
    async def test_an_object_on_a_disk_is_damaged_as_one_in_memory_is(
        self, tmp_path: Path, kind: DamageKind
    ) -> None:
        with brought_back(tmp_path) as store:
            async with opened(store) as backend:

                async def is_back() -> bool:
                    return all(await backend.exists([object_name(1)], deadline=soon()))

                await eventually(is_back)
                await usable(backend, 2)
                assert await damaged(backend, kind)
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
                assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
                assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK

    @pytest.mark.slow
    async def test_a_damage_that_a_full_store_has_no_room_for_leaves_the_object_sound(self) -> None:
        small, large, room = 1 << 20, 6 << 20, 32 << 20
        with a_store("--eviction_high_watermark_ratio=1.0", segment_bytes=room) as store:
            async with opened(store) as backend:
                await put(backend, object_name(1), page(1, small))
                await put(backend, object_name(2), page(2, large))
                await fill_up(backend, small)
                assert not await damaged(backend, DamageKind.WRONG)
                assert await get(backend, object_name(1), small) == (ReadOutcome.OK, page(1, small))


@pytest.fixture
def fault_free_log(caplog: pytest.LogCaptureFixture) -> None:
    """Without a warning for each of thousands of bad objects."""
    caplog.set_level(logging.ERROR, logger="lockstep.storage_backends")


async def drill(store: StoreUnderTest, seed: int, *, whole: bool, faults: int) -> Drill:
    """Run a drill over a new backend of the store, and return what it has counted."""
    made = Drill(store.backend(), seed, whole)
    await made.run(faults)
    return made


@pytest.mark.usefixtures("fault_free_log")
class TestDrills:
    async def test_under_drawn_faults_no_wrong_byte_is_served_and_each_is_counted_under_its_name(
        self, store: StoreUnderTest, kind_of_store: str
    ) -> None:
        check_counts(await drill(store, 1, whole=True, faults=FAULTS[kind_of_store]))

    async def test_under_drawn_faults_readers_of_some_columns_are_served_no_wrong_byte(
        self, store: StoreUnderTest, kind_of_store: str
    ) -> None:
        check_counts(await drill(store, 2, whole=False, faults=FAULTS[kind_of_store] * 3 // 5))

    @pytest.mark.slow
    async def test_damage_that_a_store_would_not_look_for_is_served_and_found_here(
        self, store: StoreUnderTest, kind_of_store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (mooncake_staged, s3_ranges, three_fs_reads):
            monkeypatch.setattr(module, "stated_checksums", whatever_is_there)
        with pytest.raises(AssertionError, match="bytes that were not its own"):
            await drill(store, 1, whole=True, faults=2 * FAULTS[kind_of_store])

    @pytest.mark.slow
    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("seed", [3, 4])
    async def test_under_thousands_of_drawn_faults_no_wrong_byte_is_served(
        self, store: StoreUnderTest, kind_of_store: str, seed: int, whole: bool
    ) -> None:
        check_counts(
            await drill(store, seed, whole=whole, faults=FAULTS[kind_of_store] * SLOW_TIMES)
        )
