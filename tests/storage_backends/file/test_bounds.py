"""Bounds of `file://`: deadlines, numbers of system calls, and unexpected entries in its directory."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import StorageError
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, WriteOutcome
from lockstep.storage_backends.file import quarantine as file_quarantine
from lockstep.storage_backends.file import write_lock_slots as file_turns
from lockstep.storage_backends.file.publish import choose_draft, draft_unnamed, sweep
from lockstep.storage_backends.file.quarantine import PLACES
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import (
    KIB,
    get,
    listed,
    object_name,
    opened,
    outcomes_of,
    page,
    put,
    put_many,
    run,
    soon_off_loop,
)
from tests.kit.storage.files import FileStore, open_refusing

SIZE = 16 * KIB
NAME = object_name(1)


def fill_places(store: FileStore, depth: int, files: int) -> None:
    """Fill every slot of the quarantine with nested directories that hold files at each level."""
    for number in range(PLACES):
        directory = store.root / "quarantine" / f"{number:02x}"
        for level in range(depth):
            directory = directory / f"d{level}"
        directory.mkdir(parents=True)
        for each in range(files):
            (directory / f"f{each}").write_bytes(b"x")
            (directory.parent / f"f{each}").write_bytes(b"x")


def make_directory_of(store: FileStore, number: int) -> None:
    store.path(object_name(number)).mkdir(parents=True)
    (store.path(object_name(number)) / "inside").write_bytes(b"x")


@pytest.mark.parametrize("depth", [1, 40])
async def test_a_quarantine_full_of_directories_takes_files_and_directories_all_the_same(
    store: FileStore, tmp_path: Path, depth: int
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")

    async with opened(store) as backend:
        fill_places(store, depth, files=3)
        for place in store.quarantined():
            (place / "link").symlink_to(outside)
        for number in range(3):
            make_directory_of(store, number)
        found_twice = [[ReadOutcome.CORRUPT] * 3, [ReadOutcome.MISSING] * 3]
        assert [await outcomes_of(backend, range(3)) for _ in range(2)] == found_twice
        assert await put_many(backend, range(3)) == [WriteOutcome.OK] * 3
        for number in range(3):
            store.spoil(object_name(number))
        assert [await outcomes_of(backend, range(3)) for _ in range(2)] == found_twice

    assert len(store.quarantined()) <= PLACES
    assert (outside / "precious").exists()


async def test_directories_too_large_to_be_removed_at_once_go_little_by_little(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_quarantine, "TAKEN_APART_MAX", 4)

    async with opened(store) as backend:
        fill_places(store, 2, files=6)
        await put(backend, NAME, page(1))
        store.spoil(NAME)
        # The quarantine is full of large directories, so the store deletes the corrupt file. The
        # file's name is free at once.
        assert (await get(backend, NAME))[0] is ReadOutcome.CORRUPT
        assert (await get(backend, NAME))[0] is ReadOutcome.MISSING
        make_directory_of(store, 1)
        outcomes = [(await get(backend, NAME))[0] for _ in range(20)]
        assert outcomes[0] is ReadOutcome.CORRUPT
        assert outcomes[-1] is ReadOutcome.MISSING


def test_what_is_quarantined_takes_no_place_that_is_taken_while_others_are_free(
    store: FileStore,
) -> None:
    """A corrupt file goes into a free quarantine slot, although the search starts at a random slot."""

    async def quarantine_one() -> None:
        async with opened(store) as backend:
            await put(backend, NAME, page(1))
            store.spoil(NAME)
            assert (await get(backend, NAME))[0] is ReadOutcome.CORRUPT

    for _ in range(PLACES):
        run(quarantine_one())

    assert len(store.quarantined()) == PLACES


class Impatient(Stop):
    """A stop signal that becomes due after `left` checks."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        super().__init__(soon_off_loop())
        self.left = left

    def due(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_nobody_waits_for_a_turn_beyond_the_deadline(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_turns, "_TIMEOUT_S", 20.0)
    content, shape = [memoryview(page(1))], ObjectShape.whole(SIZE)
    stop = Impatient(5)
    with store.files() as files:
        assert files.write(NAME, content, shape, Stop(soon_off_loop())) is WriteOutcome.OK
        store.spoil(NAME)
        held = os.open(store.root / "quarantine", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)

        outcome = files.read(Read(NAME, (memoryview(bytearray(SIZE)),), shape), stop)

        assert outcome is ReadOutcome.CORRUPT
        assert stop.left < 0
        assert store.path(NAME).exists()
        os.close(held)


@pytest.mark.parametrize(
    ("nbytes", "outcome"), [(SIZE, WriteOutcome.OK), (2 << 20, WriteOutcome.TIMED_OUT)]
)
def test_a_write_that_is_too_late_for_its_next_piece_is_given_up(
    store: FileStore, nbytes: int, outcome: WriteOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, stop, written = os.pwritev, Stop(soon_off_loop()), list[int]()

    def write_the_last(*arguments: Any) -> int:
        stop.requested = True
        written.append(pwritev(*arguments))
        return written[-1]

    with store.files() as files:
        monkeypatch.setattr(os, "pwritev", write_the_last)
        content = [memoryview(page(1, nbytes))]
        assert files.write(NAME, content, ObjectShape.whole(nbytes), stop) is outcome
        assert files.exists(NAME) == (outcome is WriteOutcome.OK)
        assert sum(written) < 1 << 20
        assert store.temporary() == []


def test_the_sweep_of_another_who_opens_does_not_spoil_the_trial_of_unnamed_files(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    with store.files():
        root_fd = os.open(store.root, os.O_RDONLY)

        def link_and_be_swept(*names: Any, **directories: Any) -> None:
            link(*names, **directories)
            sweep(root_fd)

        monkeypatch.setattr(os, "link", link_and_be_swept)
        assert choose_draft(root_fd, 0) is draft_unnamed
        os.close(root_fd)

    assert store.temporary() == []


def broken_open(broken: Path, error: int) -> Any:
    """Return an `os.open` that fails, as on a bad disk, for paths that end with `broken.name`."""
    return open_refusing(
        lambda path, flags: path.endswith(broken.name) and not flags & os.O_PATH, error
    )


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("level", ["namespace", "digits", "object"])
async def test_what_cannot_be_read_is_told_and_not_passed_over(
    store: FileStore, error: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        await put(backend, NAME, page(1))
        path = store.path(NAME)
        broken = {"object": path, "digits": path.parent, "namespace": path.parent.parent}
        monkeypatch.setattr(os, "open", broken_open(broken[level], error))
        complaint = f"{broken[level]} cannot be read: {os.strerror(error)}"
        with pytest.raises(StorageError, match=complaint):
            await listed(backend)
        monkeypatch.undo()
        assert await get(backend, NAME) == (ReadOutcome.OK, page(1))


async def test_what_goes_away_meanwhile_is_passed_over(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        await put(backend, NAME, page(1))
        await put(backend, object_name(2), page(2))
        monkeypatch.setattr(os, "open", broken_open(store.path(NAME), errno.ENOENT))
        assert [each.name for each in await listed(backend)] == [object_name(2)]
