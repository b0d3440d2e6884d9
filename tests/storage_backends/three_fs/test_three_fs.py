"""Promises of `3fs://` beyond the contract: sizes, failing indexes, bad files, slow rings."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.records.manifest import claim_model
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.three_fs.backend import ThreeFsBackend
from tests.kit.launch.stores import LAYOUT
from tests.kit.storage.calls import (
    get,
    object_name,
    opened,
    outcomes_of,
    page,
    put,
    put_many,
    reading,
    run,
    soon,
    using,
    writing,
)
from tests.kit.storage.three_fs import over_usrbio, small_store, watched
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn


async def give_up_once(begun: threading.Event, call: Coroutine[Any, Any, Any]) -> None:
    """Cancel a call after one of its operations has reached the ring, and wait until it returns."""
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_unknown_keys_cost_one_question_for_all_of_them(tmp_path: Path) -> None:
    async with watched(small_store(tmp_path)) as (backend, index):
        assert await outcomes_of(backend, range(20), 1 << 20) == [ReadOutcome.MISSING] * 20
        assert index.questions == [20]
        names = [object_name(number) for number in range(1000)]
        assert set(await backend.exists(names, deadline=soon())) == {False}
        assert index.questions == [20, 1000]


async def test_an_object_that_is_larger_than_a_slot_is_not_stored_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = small_store(tmp_path)
    room = (32 << 10) - HEADER_BYTES

    async with opened(store) as backend:
        assert await put(backend, object_name(1), page(1, room)) is WriteOutcome.OK
        assert await get(backend, object_name(1), room) == (ReadOutcome.OK, page(1, room))
        too_large = [await put(backend, object_name(n), page(n, room + 1)) for n in (2, 3)]
        assert too_large == [WriteOutcome.FAILED] * 2
        assert (await get(backend, object_name(2), room + 1))[0] is ReadOutcome.MISSING
    (warning,) = [each for each in caplog.messages if "do not fit" in each]
    assert str(room + 1) in warning
    assert "slot_bytes" in warning


@pytest.mark.parametrize(("nbytes", "wasteful"), [(4 << 10, True), (8 << 10, False)])
async def test_pages_that_leave_most_of_their_slots_empty_are_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nbytes: int, wasteful: bool
) -> None:
    store = small_store(tmp_path, file_slots=16)

    async with opened(store) as backend:
        assert await put(backend, object_name(99), page(99, 1)) is WriteOutcome.OK
        written = [await put_many(backend, range(at, at + 8), nbytes) for at in (0, 8)]
        assert written == [[WriteOutcome.OK] * 8] * 2
    warnings = [each for each in caplog.messages if "of slots of" in each]
    assert len(warnings) == wasteful
    assert all("8192 bytes" in each and "slot_bytes=20480," in each for each in warnings)
    assert all(each.startswith(f"store 3fs://{store.root}: ") for each in warnings)


def test_no_advice_is_less_than_what_a_manifest_needs_and_to_follow_it_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill(slot_bytes: int, page_bytes: int) -> list[str]:
        directory = tmp_path / str(slot_bytes)
        directory.mkdir(exist_ok=True)
        caplog.clear()
        async with opened(small_store(directory, slot_bytes=slot_bytes, file_slots=16)) as backend:
            await claim_model(backend, "m", "1", {"kv": LAYOUT}, soon())
            await put_many(backend, range(8), page_bytes)
        return [
            advised for each in caplog.messages for advised in re.findall(r"slot_bytes=(\d+)", each)
        ]

    assert run(fill(1 << 20, 4 << 10)) == ["20480"]
    assert run(fill(20 << 10, 4 << 10)) == []
    assert run(fill(20 << 10, (16 << 10) + 1)) == ["24576"]
    assert run(fill(24 << 10, (16 << 10) + 1)) == []


@pytest.mark.parametrize("other", [{"slot_bytes": 64 << 10}, {"file_slots": 5}], ids=str)
async def test_a_store_with_other_sizes_is_refused_by_name(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    store = small_store(tmp_path)
    again = small_store(tmp_path, **other)
    (name,) = other

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
    with pytest.raises(ConfigError, match=f"{name} is .* in the store"):
        await again.backend().open()
    # A process that sets no sizes uses the sizes recorded in the store.
    async with using(ThreeFsBackend(store.root, store.make_index())) as backend:
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))


async def test_an_index_of_another_directory_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    elsewhere = small_store(tmp_path / "not-mounted", store.index)

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
    with pytest.raises(ConfigError, match="belongs to another store"):
        await elsewhere.backend().open()
    async with opened(store) as backend:
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))


async def test_a_new_index_begins_the_store_of_a_directory_anew(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    anew = small_store(tmp_path, tmp_path / "new.db")

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
    async with opened(anew) as backend:
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
        assert await put(backend, object_name(2), page(2)) is WriteOutcome.OK
        assert await get(backend, object_name(2)) == (ReadOutcome.OK, page(2))


def bend_to_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def shorten(path: Path) -> None:
    os.truncate(path, 5000)


def lengthen(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("harm", [bend_to_link, make_directory, shorten, lengthen, Path.unlink])
async def test_what_is_no_file_of_slots_is_not_read_and_not_followed(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store = small_store(tmp_path)

    async with opened(store) as backend:
        await put_many(backend, range(2))
    harm(store.root / "slots-000000")
    async with opened(store) as backend:
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
        assert (await get(backend, object_name(0)))[0] is ReadOutcome.CORRUPT


async def test_a_store_says_when_it_is_opened_which_rings_and_which_index_it_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = small_store(tmp_path)

    with caplog.at_level(logging.INFO):
        async with opened(store):
            pass
    (text,) = [each for each in caplog.messages if each.startswith("opened 3fs store ")]
    assert "8 slots of 32768 bytes" in text
    assert "preadv and pwritev, because" in text
    assert f"sqlite://{tmp_path}/index.db" in text


async def test_a_usrbio_ring_that_does_not_answer_never_touches_the_caller_s_buffers(
    tmp_path: Path,
) -> None:
    stand_in = UsrbioStandIn()
    store = small_store(tmp_path, make_transfers=over_usrbio(stand_in))

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        buffer = bytearray(page(1))
        stand_in.gate.clear()
        stand_in.begun.clear()
        call = backend.read([reading(object_name(1), buffer)], deadline=soon())
        await give_up_once(stand_in.begun, call)
        assert buffer == bytearray(page(1))
        buffer[:] = bytes([0xEE]) * len(buffer)
        stand_in.gate.set()
        # A new read may use the ring only after the ring's earlier operations have completed.
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))
        assert buffer == bytes([0xEE]) * len(buffer)


async def test_a_slot_that_a_ring_may_still_write_into_is_not_lent_out_before_its_lease_is_over(
    tmp_path: Path,
) -> None:
    stand_in = UsrbioStandIn()
    store = small_store(tmp_path, file_slots=1, files=1, make_transfers=over_usrbio(stand_in))

    async with opened(store) as backend:
        stand_in.gate.clear()
        writes = [writing(object_name(1), page(1))]
        await give_up_once(stand_in.begun, backend.write(writes, deadline=soon()))
        stand_in.finish()
        assert await put(backend, object_name(2), page(2)) is WriteOutcome.FAILED
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
        store.end_leases()
        assert await put(backend, object_name(2), page(2)) is WriteOutcome.OK
        assert await get(backend, object_name(2)) == (ReadOutcome.OK, page(2))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("3fs:///mnt/kv", "has no index"),
        ("3fs:///?index=sqlite:///i", "has no path"),
        ("3fs:///mnt/kv?index=mysql://h/db", "index 'mysql://h/db' is not known"),
        ("3fs:///mnt/kv?index=sqlite:///i&slot_bytes=30000", "multiple of 4096"),
        ("3fs:///mnt/kv?index=sqlite:///i&slot_bytes=4096", "must be at least 20480"),
    ],
)
def test_a_uri_that_makes_no_sense_is_refused_by_name(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(uri)
