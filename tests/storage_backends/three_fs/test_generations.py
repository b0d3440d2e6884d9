"""Generations, leases and recency of `3fs://`: killed writers, readers that come late, full stores."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from tests.kit.programs import program
from tests.kit.storage.calls import (
    full_page,
    get,
    get_columns,
    listed,
    object_name,
    opened,
    page,
    put,
    put_columns,
    soon,
    writing,
)
from tests.kit.storage.three_fs import SlotStore, WatchedIndex, small_store
from tests.kit.storage.three_fs_writers import FIRST_KILLED, PAGE_BYTES, PHASES, store_at

PROGRAM = "tests.kit.storage.three_fs_writers"


def in_another_loop(scenario: Any) -> None:
    """Run a scenario in a thread, so that it can happen inside a call of another backend."""
    thread = threading.Thread(target=asyncio.run, args=(scenario,))
    thread.start()
    thread.join()


def meanwhile(store: SlotStore, index: WatchedIndex, scenario: Callable[[Any], Any]) -> None:
    """Let another backend do something between the next read and its confirmation."""

    async def with_another() -> None:
        async with opened(store) as other:
            await scenario(other)

    index.meanwhile = lambda: in_another_loop(with_another())


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = program(PROGRAM, *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output


async def test_a_writer_killed_in_any_phase_leaves_right_objects_and_its_slots_come_back(
    tmp_path: Path, index: str
) -> None:
    store = store_at(tmp_path / "store", index, "killed")

    async with opened(store) as backend:
        assert await put(backend, object_name(1), page(1, PAGE_BYTES)) is WriteOutcome.OK
    finish(start("killed", store.root, index, "killed"))
    async with opened(store) as backend:
        assert await get(backend, object_name(1), PAGE_BYTES) == (
            ReadOutcome.OK,
            page(1, PAGE_BYTES),
        )
        committed = PHASES.index("after committing")
        for at in range(len(PHASES)):
            number = FIRST_KILLED + at
            outcome, content = await get(backend, object_name(number), PAGE_BYTES)
            if at == committed:
                assert (outcome, content) == (ReadOutcome.OK, page(number, PAGE_BYTES))
            else:
                assert outcome is ReadOutcome.MISSING
        assert backend.counters().reads_corrupt == 0
        store.end_leases()
        # Exactly the slots that have no object are free: nothing gives way to these.
        for number in range(2, 16):
            content = page(number, PAGE_BYTES)
            assert await put(backend, object_name(200 + number), content) is WriteOutcome.OK
        for number in range(2, 16):
            outcome, content = await get(backend, object_name(200 + number), PAGE_BYTES)
            assert (outcome, content) == (ReadOutcome.OK, page(number, PAGE_BYTES))
        names = [object_name(1), object_name(FIRST_KILLED + committed)]
        assert await backend.exists(names, deadline=soon()) == [True, True]
        assert len(await listed(backend)) == 16


async def test_of_two_processes_that_write_a_name_exactly_one_wins(
    tmp_path: Path, index: str
) -> None:
    names = 12
    store = store_at(tmp_path / "store", index, "racing")
    writers = [start("racing", store.root, index, "racing", writer, names) for writer in range(2)]
    wins = [int(finish(writer)) for writer in writers]
    assert sum(wins) == names

    async with opened(store) as backend:
        contents = [page(writer, PAGE_BYTES) for writer in range(2)]
        found = [0, 0]
        for number in range(names):
            outcome, content = await get(backend, object_name(number), PAGE_BYTES)
            assert outcome is ReadOutcome.OK
            found[contents.index(content)] += 1
        assert found == wins


async def test_a_reader_that_meets_the_wrong_generation_has_a_miss(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    index = WatchedIndex(f"{tmp_path}/index.db")

    backend = store.backend(index)
    await backend.open()
    await put(backend, object_name(1), page(1))
    # The bytes are still there, and right; but nothing says so any more.
    meanwhile(store, index, lambda other: other.remove([object_name(1)], deadline=soon()))
    assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
    await backend.close()


async def test_a_slot_that_was_lent_out_during_a_read_is_a_miss_and_harms_nobody(
    tmp_path: Path,
) -> None:
    store = small_store(tmp_path, file_slots=1, files=1)
    index = WatchedIndex(f"{tmp_path}/index.db")

    backend = store.backend(index)
    await backend.open()
    await put(backend, object_name(1), page(1))
    entry = store.entry(object_name(1))
    async with opened(store) as other:
        await put(other, object_name(2), page(2))
    # As the reader knows it, the slot is still that of the first object.
    index.late_answer = entry
    assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
    assert backend.counters().reads_corrupt == 0
    async with opened(store) as other:
        assert await get(other, object_name(2)) == (ReadOutcome.OK, page(2))
    await backend.close()


async def test_a_reader_follows_an_object_that_was_replaced_under_its_hands(tmp_path: Path) -> None:
    store = small_store(tmp_path, slot_bytes=64 << 10)
    index = WatchedIndex(f"{tmp_path}/index.db")

    backend = store.backend(index)
    await backend.open()
    await put_columns(backend, object_name(1), 0, author=1)
    meanwhile(store, index, lambda other: put_columns(other, object_name(1), 1, author=2))
    assert await get_columns(backend, object_name(1), 0) == (
        ReadOutcome.OK,
        full_page(0, author=2),
    )
    await backend.close()


async def test_what_a_writer_from_the_dead_puts_into_a_slot_of_another_is_a_miss(
    tmp_path: Path, index: str
) -> None:
    store = small_store(tmp_path, index)

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        await put(backend, object_name(2), page(2))
        one, two = store.entry(object_name(1)), store.entry(object_name(2))
        with (store.root / one.place).open("r+b") as file:
            late = os.pread(file.fileno(), HEADER_BYTES + one.length, one.offset)
            os.pwrite(file.fileno(), late, two.offset)
        assert (await get(backend, object_name(2)))[0] is ReadOutcome.CORRUPT
        assert (await get(backend, object_name(2)))[0] is ReadOutcome.MISSING
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))


async def test_when_all_slots_are_used_the_least_recently_used_objects_give_way(
    tmp_path: Path, index: str
) -> None:
    store = small_store(tmp_path, index)

    async with opened(store) as backend:
        for number in range(8):
            await put(backend, object_name(number), page(number))
        for number in (0, 3):
            assert (await get(backend, object_name(number)))[0] is ReadOutcome.OK
        for number in range(8, 14):
            assert await put(backend, object_name(number), page(number)) is WriteOutcome.OK
        kept = [0, 3, *range(8, 14)]
        for number in range(14):
            outcome, content = await get(backend, object_name(number))
            if number in kept:
                assert (outcome, content) == (ReadOutcome.OK, page(number))
            else:
                assert outcome is ReadOutcome.MISSING
        assert len(await listed(backend)) == 8


async def test_a_batch_of_more_objects_than_there_are_slots_is_written_all_the_same(
    tmp_path: Path, index: str
) -> None:
    store = small_store(tmp_path, index)

    async with opened(store) as backend:
        writes = [writing(object_name(number), page(number)) for number in range(50)]
        assert set(await backend.write(writes, deadline=soon())) == {WriteOutcome.OK}
        assert len(await listed(backend)) == 8


async def test_while_all_slots_are_being_written_by_others_a_write_fails(
    tmp_path: Path, index: str
) -> None:
    store = small_store(tmp_path, index)

    async with opened(store) as backend:
        others = store.opened_index()
        assert len(others.reserve(8, 3600.0)) == 8
        assert await put(backend, object_name(1), page(1)) is WriteOutcome.FAILED
        store.end_leases()
        assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK
        others.close()
