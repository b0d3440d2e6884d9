"""What the SQLite page index promises beyond the others: reads that wait for nobody, and full disks."""

import os
import sqlite3
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.storage_backends.page_index import uses as page_index_uses
from lockstep.storage_backends.page_index.contract import (
    NOTHING,
    Commit,
    CommitOutcome,
    Reservation,
)
from lockstep.storage_backends.page_index.sqlite import SqlitePageIndex
from lockstep.storage_backends.page_index.sqlite_file import use_wal
from tests.kit.storage.index_entries import LONG_S, entry, key

PATIENCE_S = 60.0


@pytest.fixture
def index(tmp_path: Path) -> Generator[SqlitePageIndex]:
    """With entries 0 to 3 in all of its slots."""
    opened = SqlitePageIndex(f"{tmp_path}/pages.db")
    opened.open()
    opened.provide(4)
    for number, lent in enumerate(opened.reserve(4, LONG_S)):
        wish = Commit(entry(number, lent), lent.slot, NOTHING)
        assert opened.commit([wish]) == [CommitOutcome.DONE]
    yield opened
    opened.close()


@contextmanager
def writer_held_up(index: SqlitePageIndex, path: Path) -> Generator[Future[list[Reservation]]]:
    """Another process writes for as long as this lasts, and a thread of ours waits to write."""
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(index.reserve, 1, LONG_S)
            give_up = time.monotonic() + PATIENCE_S
            while not index._writing.lock.locked():  # pyright: ignore[reportPrivateUsage]
                assert time.monotonic() < give_up
            try:
                yield waiting
                assert not waiting.done()
            finally:
                lock.execute("ROLLBACK")
            waiting.result(PATIENCE_S)
    finally:
        lock.close()


def test_a_reader_does_not_wait_behind_a_writer_whom_another_process_holds_up(
    index: SqlitePageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each use is to go into the file at once, which the other process keeps it from.
    monkeypatch.setattr(page_index_uses, "USES_KEPT_S", 0.0)
    with writer_held_up(index, tmp_path / "pages.db"):
        found = [
            found
            for number in range(4)
            for found in (*index.look_up([key(number)]), *index.confirm([key(number)]))
        ]
        assert len(found) == 8
        assert None not in found
        assert [len(some) for some in index.entries()] == [4]


def test_a_use_that_could_not_be_told_while_another_wrote_counts_all_the_same(
    index: SqlitePageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_index_uses, "USES_KEPT_S", 0.0)
    lock = sqlite3.connect(tmp_path / "pages.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    index.confirm([key(0)])
    lock.execute("ROLLBACK")
    lock.close()
    index.reserve(3, LONG_S)
    assert [each is not None for each in index.look_up([key(number) for number in range(4)])] == [
        True,
        False,
        False,
        False,
    ]


def test_uses_that_cannot_be_told_take_no_memory_without_end(
    index: SqlitePageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_index_uses, "USES_KEPT_MAX", 8)
    uses = page_index_uses.Uses(time.time)
    assert [uses.note([key(number)]) for number in range(8)] == [False] * 7 + [True]
    for number in range(100):
        uses.note([key(number)])
    assert len(uses.pop_all()) <= 16
    assert not uses


def test_a_full_disk_is_named(index: SqlitePageIndex, tmp_path: Path) -> None:
    database: Any = index._writing.database  # pyright: ignore[reportPrivateUsage]
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    index.provide(1 << 20)
    with pytest.raises(StorageError) as raised:
        index.reserve(1 << 16, LONG_S)
    assert f"the filesystem of {tmp_path} is full" in str(raised.value)
    assert "make room on it" in str(raised.value)
    database.execute("PRAGMA max_page_count = 1000000")
    assert len(index.reserve(8, LONG_S)) == 8


@pytest.mark.parametrize(("left", "is_full"), [(0, True), (1 << 30, False)])
def test_an_input_or_output_error_is_one_of_a_full_disk_only_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, is_full: bool
) -> None:
    real_statvfs = os.statvfs

    def statvfs(path: Any) -> os.statvfs_result:
        fields = list(real_statvfs(path))
        fields[1], fields[4] = 4096, left // 4096
        return os.statvfs_result(fields)

    def connect(*_: Any, **__: Any) -> sqlite3.Connection:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        raise error

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(ConfigError, match="disk I/O error") as raised:
        SqlitePageIndex(f"{tmp_path}/pages.db").open()
    assert (f"the filesystem of {tmp_path} is full" in str(raised.value)) is is_full
    assert ("on a local filesystem" in str(raised.value)) is not is_full


def test_many_threads_read_and_write_one_index(index: SqlitePageIndex) -> None:
    index.provide(64)

    def use(thread: int) -> None:
        for number in range(thread * 10, thread * 10 + 10):
            (lent,) = index.reserve(1, LONG_S)
            index.commit([Commit(entry(number, lent), lent.slot, NOTHING)])
            index.confirm([key(number)])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use, range(1, 5), timeout=PATIENCE_S)) == [None] * 4
    assert all(index.look_up([key(number) for number in range(10, 50)]))


def test_a_database_that_another_is_just_about_to_change_is_waited_for(tmp_path: Path) -> None:
    """SQLite says at once that it is locked where two connections change the journal's mode."""
    path = tmp_path / "index.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE there (x)")
    other.execute("BEGIN IMMEDIATE")
    ours = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    ends = threading.Timer(0.05, other.execute, ["COMMIT"])
    ends.start()

    assert use_wal(ours, 60.0) == "wal"
    ends.join()
    other.close()
    ours.close()


def test_a_database_that_stays_locked_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE there (x)")
    other.execute("BEGIN EXCLUSIVE")
    ours = sqlite3.connect(path, timeout=0.0, isolation_level=None)

    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_wal(ours, 0.02)
    ours.close()
    other.close()
