"""`file://` racing with other processes and cleaners, and on filesystems that lack features."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, WriteOutcome
from lockstep.storage_backends.file.objects import ObjectFiles
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import Found, get, object_name, opened, page, put, soon_off_loop
from tests.kit.storage.files import FileStore, descriptors_open, failing, forbid_unnamed_files

NAME = object_name(1)


def after_the_next_look(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """Call `act` once, right after a writer has checked the object's file with `os.stat`."""
    real_stat = os.stat

    def look_and_lose_time(path: Any, **named: Any) -> os.stat_result:
        status = real_stat(path, **named)
        if store.path(NAME) == store.root / str(path):
            monkeypatch.setattr(os, "stat", real_stat)
            act()
        return status

    monkeypatch.setattr(os, "stat", look_and_lose_time)


def write(files: ObjectFiles) -> WriteOutcome:
    content = memoryview(page(1))
    return files.write(NAME, [content], ObjectShape.whole(len(content)), Stop(soon_off_loop()))


def read(files: ObjectFiles) -> Found:
    buffer = page(0)
    shape, stop = ObjectShape.whole(len(buffer)), Stop(soon_off_loop())
    return files.read(Read(NAME, (memoryview(buffer),), shape), stop), buffer


def test_a_writer_never_takes_away_what_another_has_just_published(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[WriteOutcome] = []
    with store.files() as mine, store.files() as theirs:
        write(mine)
        store.path(NAME).write_bytes(b"torn")
        after_the_next_look(store, monkeypatch, lambda: outcomes.append(write(theirs)))
        outcomes.append(write(mine))

        assert outcomes == [WriteOutcome.OK, WriteOutcome.PRESENT]
        assert read(mine) == (ReadOutcome.OK, page(1))
        assert [path.read_bytes() for path in store.quarantined()] == [b"torn"]


def test_a_writer_that_finds_something_in_its_way_which_has_just_gone_stores_its_object(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.files() as files:
        write(files)
        store.path(NAME).write_bytes(b"torn")
        after_the_next_look(store, monkeypatch, store.path(NAME).unlink)

        assert write(files) is WriteOutcome.OK
        assert read(files) == (ReadOutcome.OK, page(1))
        assert store.quarantined() == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
async def test_a_filesystem_without_locks_and_unnamed_files_stores_all_the_same(
    store: FileStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_unnamed_files(monkeypatch)
    monkeypatch.setattr(fcntl, "flock", failing(number))

    async with opened(store) as backend:
        before = descriptors_open()
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        assert await get(backend, NAME) == (ReadOutcome.OK, page(1))
        assert descriptors_open() == before
        assert store.temporary() == []


async def test_a_draft_that_cannot_be_locked_leaves_neither_a_file_nor_a_descriptor(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_unnamed_files(monkeypatch)

    async with opened(store) as backend:
        before = descriptors_open()
        monkeypatch.setattr(fcntl, "flock", failing())
        assert await put(backend, NAME, page(1)) is WriteOutcome.FAILED
        assert descriptors_open() == before
        assert store.temporary() == []


async def test_without_locks_only_old_temporary_files_are_swept(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))

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


@pytest.mark.usefixtures("each_kind_of_file")
async def test_directories_that_were_removed_below_an_open_store_come_back_with_the_next_write(
    store: FileStore,
) -> None:
    async with opened(store) as backend:
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        shutil.rmtree(store.root / "objects")
        shutil.rmtree(store.root / "temporary")
        assert (await get(backend, NAME))[0] is ReadOutcome.MISSING
        assert await put(backend, NAME, page(1)) is WriteOutcome.OK
        assert await get(backend, NAME) == (ReadOutcome.OK, page(1))
