"""Generations, leases and recency of `3fs://`: killed writers, late readers, full stores."""

import asyncio
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from tests.kit.programs import program
from tests.kit.storage.calls import (
    found,
    full_page,
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
)
from tests.kit.storage.three_fs import SlotStore, WatchedIndex, small_store, watched
from tests.kit.storage.three_fs_writers import FIRST_KILLED, PAGE_BYTES, PHASES, store_at

PROGRAM = "tests.kit.storage.three_fs_writers"


def in_another_loop(scenario: Any) -> None:
    """Run a coroutine in another thread's event loop, and block until it has ended."""
    thread = threading.Thread(target=asyncio.run, args=(scenario,))
    thread.start()
    thread.join()


def meanwhile(store: SlotStore, index: WatchedIndex, scenario: Callable[[Any], Any]) -> None:
    """Run a scenario with another backend during the next read, before the read is confirmed."""

    async def with_another() -> None:
        async with opened(store) as other:
            await scenario(other)

    index.meanwhile = lambda: in_another_loop(with_another())


def kill_writers(store: SlotStore) -> None:
    subprocess.run(program(PROGRAM, store.root, store.index), check=True, timeout=120)


async def test_a_writer_killed_in_any_phase_leaves_right_objects_and_its_slots_come_back(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path / "store", tmp_path / "index.db")
    killed = range(FIRST_KILLED, FIRST_KILLED + len(PHASES))
    standing = [1, FIRST_KILLED + PHASES.index("after committing")]
    new = range(202, 216)

    async with opened(store) as backend:
        assert await put_many(backend, [1], PAGE_BYTES) == [WriteOutcome.OK]
    kill_writers(store)
    async with opened(store) as backend:
        assert await get_many(backend, standing, PAGE_BYTES) == found(standing, PAGE_BYTES)
        gone = await outcomes_of(backend, [each for each in killed if each not in standing])
        assert gone == [ReadOutcome.MISSING] * (len(PHASES) - 1)
        store.end_leases()
        # Only slots with an object are in use, so these writes evict nothing.
        written = [(await put_many(backend, [each], PAGE_BYTES))[0] for each in new]
        assert written == [WriteOutcome.OK] * len(new)
        assert await get_many(backend, new, PAGE_BYTES) == found(new, PAGE_BYTES)
        names = [object_name(each) for each in standing]
        assert await backend.exists(names, deadline=soon()) == [True, True]
        assert len(await listed(backend)) == 16


async def test_a_slot_that_was_lent_out_during_a_read_is_a_miss_and_harms_nobody(
    tmp_path: Path,
) -> None:
    store = small_store(tmp_path, file_slots=1, files=1)
    async with watched(store) as (backend, index), opened(store) as other:
        await put(backend, object_name(1), page(1))
        entry = store.entry(object_name(1))
        await put(other, object_name(2), page(2))
        # The reader gets an old index entry, which names the slot's former object.
        index.late_answer = entry
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING
        assert await get(other, object_name(2)) == (ReadOutcome.OK, page(2))


async def test_a_reader_follows_an_object_that_was_replaced_under_its_hands(tmp_path: Path) -> None:
    store = small_store(tmp_path, slot_bytes=64 << 10)
    async with watched(store) as (backend, index):
        await put_columns(backend, object_name(1), 0, author=1)
        meanwhile(store, index, lambda other: put_columns(other, object_name(1), 1, author=2))
        assert await get_columns(backend, object_name(1), 0) == (
            ReadOutcome.OK,
            full_page(0, author=2),
        )


async def test_while_all_slots_are_being_written_by_others_a_write_fails(tmp_path: Path) -> None:
    store = small_store(tmp_path)

    async with opened(store) as backend:
        others = store.opened_index()
        assert len(others.reserve(8, 3600.0)) == 8
        assert await put(backend, object_name(1), page(1)) is WriteOutcome.FAILED
        store.end_leases()
        assert await put(backend, object_name(1), page(1)) is WriteOutcome.OK
        others.close()
