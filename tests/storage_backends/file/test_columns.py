"""An object's file is replaced by one with more columns."""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.page_format.object_shape import ObjectShape, Part
from lockstep.storage_backends.base import Read, ReadOutcome, WriteOutcome
from lockstep.storage_backends.file import write_lock_slots as file_turns
from lockstep.storage_backends.file.contents import BLOCK_BYTES
from lockstep.storage_backends.file.objects import ObjectFiles
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import (
    EVERY,
    KIB,
    columns,
    full_page,
    get_columns,
    object_name,
    opened,
    page,
    put,
    put_columns,
    reading,
    soon,
    soon_off_loop,
)
from tests.kit.storage.files import FileStore, failing

NAME = object_name(1)


@pytest.mark.usefixtures("each_kind_of_file")
async def test_writes_and_replacements_leave_one_object_and_no_temporary_file(
    store: FileStore,
) -> None:
    async with opened(store) as backend:
        fuller = (0, 0b001, 0b011, EVERY, EVERY)
        outcomes = [await put_columns(backend, NAME, present) for present in fuller]

    assert outcomes == [WriteOutcome.OK] * 4 + [WriteOutcome.PRESENT]
    assert store.objects() == [store.path(NAME)]
    assert store.path(NAME).stat().st_size == BLOCK_BYTES + len(full_page(EVERY))
    assert store.path(NAME).stat().st_nlink == 1
    assert store.temporary() == store.quarantined() == []


@pytest.mark.usefixtures("each_kind_of_file")
async def test_a_replacement_that_fails_leaves_the_object_as_it_was(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        await put_columns(backend, NAME, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing())
            assert await put_columns(backend, NAME, EVERY) is WriteOutcome.FAILED
        assert await get_columns(backend, NAME, 0) == (ReadOutcome.OK, full_page(0))
        assert store.temporary() == []
        assert await put_columns(backend, NAME, EVERY) is WriteOutcome.OK


async def test_a_sweep_spares_the_name_that_a_replacement_has_for_a_moment(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_replace = os.replace

    def sweep_first(*names: Any, **directories: Any) -> None:
        monkeypatch.setattr(os, "replace", real_replace)
        # Run a sweep by opening the store again, just before the writer replaces the object's file.
        with store.files():
            real_replace(*names, **directories)

    async with opened(store) as backend:
        await put_columns(backend, NAME, 0)
        monkeypatch.setattr(os, "replace", sweep_first)
        assert await put_columns(backend, NAME, EVERY) is WriteOutcome.OK


async def test_a_turn_that_does_not_come_fails_the_write_in_time_and_changes_nothing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_turns, "_TIMEOUT_S", 0.01)

    async with opened(store) as backend:
        await put_columns(backend, NAME, 0)
        held = os.open(store.root / "quarantine", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert await put_columns(backend, NAME, EVERY) is WriteOutcome.FAILED
        os.close(held)
        assert await get_columns(backend, NAME, 0) == (ReadOutcome.OK, full_page(0))
        assert store.temporary() == []


def test_a_writer_that_was_overtaken_looks_again_and_loses_nothing_of_the_other(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, real_write = Stop(soon_off_loop()), os.pwritev
    outcomes: list[WriteOutcome] = []

    def write(files: ObjectFiles, present: int) -> None:
        content = memoryview(full_page(present))
        outcomes.append(files.write(NAME, [content], columns(present), stop))

    def be_overtaken(*arguments: Any) -> int:
        monkeypatch.setattr(os, "pwritev", real_write)
        write(theirs, 0b110)
        return real_write(*arguments)

    with store.files() as mine, store.files() as theirs:
        write(mine, 0)
        monkeypatch.setattr(os, "pwritev", be_overtaken)
        write(mine, 0b001)

        buffer = bytearray(len(full_page(EVERY)))
        assert mine.read(Read(NAME, (memoryview(buffer),), columns(EVERY)), stop) is ReadOutcome.OK
        assert buffer == full_page(EVERY)
        assert outcomes == [WriteOutcome.OK] * 3


async def test_columns_that_are_there_are_found_by_the_file_s_length_alone(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> int:
        raise AssertionError("a file was opened")

    async with opened(store) as backend:
        await put_columns(backend, object_name(1), 0)
        await put_columns(backend, object_name(2), EVERY)
        monkeypatch.setattr(os, "open", never)
        assert await put_columns(backend, object_name(1), 0) is WriteOutcome.PRESENT
        assert await put_columns(backend, object_name(2), EVERY) is WriteOutcome.PRESENT


@pytest.mark.parametrize("present", [0b001, 0b011, EVERY])
@pytest.mark.parametrize("change", [-9000, -1, 1, 4096], ids=str)
async def test_a_file_that_is_not_as_long_as_its_bits_say_is_neither_served_nor_kept(
    store: FileStore, present: int, change: int
) -> None:
    async with opened(store) as backend:
        for number in (1, 2):
            await put_columns(backend, object_name(number), present)
            path = store.path(object_name(number))
            os.truncate(path, path.stat().st_size + change)
        assert (await get_columns(backend, object_name(1), 0))[0] is ReadOutcome.CORRUPT
        assert await put_columns(backend, object_name(2), 0) is WriteOutcome.OK
        assert await get_columns(backend, object_name(2), 0) == (ReadOutcome.OK, full_page(0))


@pytest.mark.parametrize("between", [5000, 8 * KIB])
async def test_direct_io_reads_columns_that_begin_anywhere_in_an_object(
    tmp_path: Path, between: int
) -> None:
    store = FileStore(tmp_path / "store", direct=True)
    parts = (Part(16 * KIB), Part(between, 0), Part(4 * KIB, 1))
    content = page(1, 20 * KIB + between)

    async with opened(store) as backend:
        await put(backend, NAME, content, ObjectShape(parts, (0, 1, 2)))
        buffer = memoryview(mmap.mmap(-1, 20 * KIB))
        reads = [reading(NAME, buffer, ObjectShape(parts, (0, 2)))]
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK]
        assert buffer == content[: 16 * KIB] + content[-4 * KIB :]
