"""`file://` beside other processes and cleaners, and where the filesystem lacks what others have."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.file.objects import ObjectFiles
from lockstep.storage_backends.thread_calls import Stop
from tests.kit.storage.calls import get, object_name, opened, page, put, soon_off_loop
from tests.kit.storage.files import FileStore, forbid_unnamed_files

NAME = object_name(1)


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("bad", ["torn", "gone"])
def test_a_writer_never_takes_away_what_another_has_just_published(
    store: FileStore, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [ObjectFiles(store.root, store.durability, direct=False) for _ in range(2)]
    for each in files:
        each.open()
    mine, theirs = files
    stop = Stop(soon_off_loop())
    content = memoryview(page(1))
    shape = ObjectShape.whole(len(content))
    mine.write(NAME, [content], shape, stop)
    store.path(NAME).write_bytes(b"torn")
    real_stat = os.stat
    outcomes: list[WriteOutcome] = []

    def look_and_lose_time(path: Any, **named: Any) -> os.stat_result:
        status = real_stat(path, **named)
        if store.path(NAME) == store.root / str(path):
            monkeypatch.setattr(os, "stat", real_stat)
            if bad == "gone":
                store.path(NAME).unlink()
            else:
                outcomes.append(theirs.write(NAME, [content], shape, stop))
        return status

    monkeypatch.setattr(os, "stat", look_and_lose_time)
    outcomes.append(mine.write(NAME, [content], shape, stop))
    buffer = bytearray(len(content))
    assert mine.read(NAME, [memoryview(buffer)], shape, stop) is ReadOutcome.OK
    if bad == "gone":
        assert outcomes == [WriteOutcome.OK]
        assert store.quarantined() == []
    else:
        assert outcomes == [WriteOutcome.OK, WriteOutcome.PRESENT]
        assert [path.read_bytes() for path in store.quarantined()] == [b"torn"]
    for each in files:
        each.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
async def test_a_filesystem_without_locks_and_unnamed_files_stores_all_the_same(
    store: FileStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_unnamed_files(monkeypatch)
    refuse_locks(monkeypatch, number)

    async with opened(store) as backend:
        before = open_files()
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        assert await get(backend, NAME) == (ReadOutcome.OK, page(1))
        assert open_files() == before
        assert store.temporary() == []


async def test_a_draft_that_cannot_be_locked_leaves_neither_a_file_nor_a_descriptor(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_unnamed_files(monkeypatch)

    async with opened(store) as backend:
        before = open_files()
        refuse_locks(monkeypatch, errno.EIO)
        assert await put(backend, NAME, page(1)) is WriteOutcome.FAILED
        assert open_files() == before
        assert store.temporary() == []


async def test_without_locks_only_old_temporary_files_are_swept(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.ENOLCK)

    async with opened(store):
        pass
    young, old = (store.root / "temporary" / name for name in ("00", "01"))
    for path, age_s in ((young, 60), (old, 7200)):
        path.write_bytes(b"x")
        then = time.time() - age_s
        os.utime(path, (then, then))
    async with opened(store):
        assert store.temporary() == [young]


async def test_a_published_object_is_ok_though_a_cleaner_took_its_temporary_name(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_unnamed_files(monkeypatch)
    real_link: Callable[..., None] = os.link

    def link(source: Any, target: Any, **named: Any) -> None:
        real_link(source, target, **named)
        (store.root / source).unlink()

    async with opened(store) as backend:
        monkeypatch.setattr(os, "link", link)
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        assert await get(backend, NAME) == (ReadOutcome.OK, page(1))


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
async def test_directories_that_were_removed_below_an_open_store_come_back_with_the_next_write(
    store: FileStore, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named:
        forbid_unnamed_files(monkeypatch)

    async with opened(store) as backend:
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        shutil.rmtree(store.root / "objects")
        shutil.rmtree(store.root / "temporary")
        assert (await get(backend, NAME))[0] is ReadOutcome.MISSING
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        assert await get(backend, NAME) == (ReadOutcome.OK, page(1))
