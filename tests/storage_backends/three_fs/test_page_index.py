"""The contract of a page index, and its answers with damaged files, busy files and full disks."""

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.storage_backends.three_fs import page_index
from lockstep.storage_backends.three_fs.index_file import path_of, use_wal
from lockstep.storage_backends.three_fs.page_index import (
    NOTHING,
    Commit,
    CommitOutcome,
    Entry,
    PageIndex,
    Reservation,
)
from tests.kit.storage.three_fs import alter

LONG_S = 3600.0
"""A lease in seconds that does not expire while a test runs."""
PATIENCE_S = 60.0
Connect = Callable[[], PageIndex]
"""Opens one more connection to the index under test, as another process would."""


@pytest.fixture
def connect(tmp_path: Path) -> Generator[Connect]:
    opened: list[PageIndex] = []

    def one_more() -> PageIndex:
        index = PageIndex(tmp_path / "pages.db")
        index.open()
        opened.append(index)
        return index

    yield one_more
    for index in opened:
        index.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def entry(number: int, lent: Reservation, present: int = 0) -> Entry:
    return Entry(key(number), f"file {number}", lent.slot << 20, 1 << 14, present, lent.generation)


def commit(
    index: PageIndex,
    number: int,
    reservation: Reservation,
    *,
    replaces: int = NOTHING,
    present: int = 0,
    kept: bool = False,
) -> CommitOutcome:
    (outcome,) = index.commit(
        [Commit(entry(number, reservation, present), reservation.slot, replaces, kept)]
    )
    return outcome


def put(index: PageIndex, number: int, *, kept: bool = False) -> Entry:
    (reservation,) = index.reserve(1, LONG_S)
    assert commit(index, number, reservation, kept=kept) is CommitOutcome.DONE
    return entry(number, reservation)


def test_what_was_reserved_is_seen_by_nobody_until_it_is_committed(connect: Connect) -> None:
    writer, reader = connect(), connect()
    writer.provide(4)
    (reservation,) = writer.reserve(1, LONG_S)
    assert reader.look_up([key(1)]) == [None]
    assert commit(writer, 1, reservation, present=(1 << 64) - 1) is CommitOutcome.DONE
    assert reader.look_up([key(2), key(1)]) == [None, entry(1, reservation, present=(1 << 64) - 1)]


def test_no_two_writers_are_lent_one_slot_and_no_generation_comes_twice(connect: Connect) -> None:
    first, second = connect(), connect()
    first.provide(40)
    lent: list[Reservation] = []

    def take(index: PageIndex) -> None:
        lent.extend(index.reserve(5, LONG_S))

    threads = [threading.Thread(target=take, args=(index,)) for index in (first, second) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.slot for each in lent) == list(range(40))
    assert len({each.generation for each in lent}) == 40
    assert first.reserve(1, LONG_S) == []


def test_a_slot_whose_lease_is_over_is_lent_again_under_a_new_generation(connect: Connect) -> None:
    dead, alive = connect(), connect()
    dead.provide(1)
    (old,) = dead.reserve(1, 0.0)
    (new,) = alive.reserve(1, LONG_S)
    assert new.slot == old.slot
    assert new.generation > old.generation
    assert commit(dead, 1, old) is CommitOutcome.LOST
    assert commit(alive, 2, new) is CommitOutcome.DONE
    assert alive.look_up([key(1), key(2)]) == [None, entry(2, new)]


def test_a_late_writer_whose_slot_nobody_has_taken_may_still_commit(connect: Connect) -> None:
    index = connect()
    index.provide(1)
    (late,) = index.reserve(1, 0.0)
    assert commit(index, 1, late) is CommitOutcome.DONE


def test_the_first_to_commit_a_key_wins_and_the_other_s_slot_is_free(connect: Connect) -> None:
    first, second = connect(), connect()
    first.provide(2)
    (one,) = first.reserve(1, LONG_S)
    (two,) = second.reserve(1, LONG_S)
    assert commit(second, 7, two) is CommitOutcome.DONE
    assert commit(first, 7, one) is CommitOutcome.STANDS
    assert first.look_up([key(7)]) == [entry(7, two)]
    (again,) = first.reserve(1, LONG_S)
    assert again.slot == one.slot


def test_to_commit_what_was_committed_is_done(connect: Connect) -> None:
    index = connect()
    index.provide(2)
    (reservation,) = index.reserve(1, LONG_S)
    assert commit(index, 1, reservation) is CommitOutcome.DONE
    assert commit(index, 1, reservation) is CommitOutcome.DONE
    assert len(index.reserve(2, LONG_S)) == 2


def test_an_entry_gives_way_only_to_whoever_has_seen_it_last(connect: Connect) -> None:
    index = connect()
    index.provide(3)
    old = put(index, 1)
    one, two = index.reserve(2, LONG_S)
    assert commit(index, 1, one, replaces=old.generation, present=1) is CommitOutcome.DONE
    assert commit(index, 1, two, replaces=old.generation, present=2) is CommitOutcome.STANDS
    assert index.look_up([key(1)]) == [entry(1, one, present=1)]
    # Two slots are free again: that of the replaced entry, and that of the late writer. Two new
    # reservations therefore evict nothing.
    assert len(index.reserve(2, LONG_S)) == 2
    assert index.look_up([key(1)]) != [None]


def test_when_all_slots_are_used_the_least_recently_used_entries_give_way(connect: Connect) -> None:
    index = connect()
    index.provide(4)
    kept = [put(index, number) for number in range(4)]
    assert index.confirm([key(1), key(0)]) == [kept[1], kept[0]]
    put(index, 4)
    put(index, 5)
    put(index, 6)
    found = index.look_up([key(number) for number in range(7)])
    assert [each is not None for each in found] == [True, False, False, False, True, True, True]


def test_an_entry_that_is_kept_never_gives_way_and_can_be_removed(connect: Connect) -> None:
    index = connect()
    index.provide(3)
    record = put(index, 0, kept=True)
    confirmed: list[Entry | None] = []
    for number in range(1, 9):
        put(index, number)
        # Using the kept entry must not make it an ordinary entry, which would be evicted some time.
        confirmed += index.confirm([key(0)])
    assert confirmed == [record] * 8
    ages = {used.entry.key: used.age_s for some in index.entries() for used in some}
    assert set(ages) == {key(0), key(7), key(8)}
    assert ages[key(0)] is None
    assert ages[key(8)] is not None
    index.remove([key(0)])
    assert index.look_up([key(0), key(7), key(8)])[0] is None
    assert len(index.reserve(3, LONG_S)) == 3
    assert index.reserve(1, LONG_S) == []


def test_only_the_very_entry_that_was_found_wrong_is_dropped(connect: Connect) -> None:
    index = connect()
    index.provide(2)
    old = put(index, 1)
    index.remove([key(1)])
    new = put(index, 1)
    index.drop([old])
    assert index.look_up([key(1)]) == [new]
    index.drop([new, new])
    assert index.look_up([key(1)]) == [None]
    assert len(index.reserve(2, LONG_S)) == 2


def test_a_released_slot_is_free_unless_it_was_lent_again(connect: Connect) -> None:
    index = connect()
    index.provide(1)
    (old,) = index.reserve(1, LONG_S)
    index.release([old])
    (new,) = index.reserve(1, LONG_S)
    index.release([old])
    assert index.reserve(1, LONG_S) == []
    assert commit(index, 1, new) is CommitOutcome.DONE
    index.release([new])
    assert index.look_up([key(1)]) == [entry(1, new)]


def test_slots_are_only_ever_added(connect: Connect) -> None:
    first, second = connect(), connect()
    assert first.provide(3) == 3
    assert second.provide(2) == 3
    assert second.provide(5) == 5
    assert len(first.reserve(9, LONG_S)) == 5


def test_batches_of_thousands_keep_their_order(connect: Connect) -> None:
    index = connect()
    count = 2300
    index.provide(count)
    lent = index.reserve(count, LONG_S)
    assert len(lent) == count
    wishes = [Commit(entry(at, each), each.slot, NOTHING) for at, each in enumerate(lent)]
    assert index.commit(wishes) == [CommitOutcome.DONE] * count
    keys = [key(number) for number in reversed(range(count + 50))]
    expected = [None] * 50 + [each.entry for each in reversed(wishes)]
    assert index.look_up(keys) == expected
    assert index.confirm(keys) == expected
    listed = [used for some in index.entries() for used in some]
    assert sorted(used.entry.key for used in listed) == sorted(keys[50:])
    assert all(used.age_s is not None and used.age_s < LONG_S for used in listed)
    index.remove(keys)
    assert list(index.entries()) == []
    assert index.look_up(keys) == [None] * len(keys)


def test_use_that_one_process_noted_counts_for_the_others_at_the_latest_when_it_closes(
    connect: Connect,
) -> None:
    reader, writer = connect(), connect()
    writer.provide(2)
    put(writer, 1)
    put(writer, 2)
    reader.confirm([key(1)])
    reader.close()
    put(writer, 3)
    found = writer.look_up([key(1), key(2), key(3)])
    assert [each is not None for each in found] == [True, False, True]


def test_a_sqlite_index_is_the_user_s_own_file(tmp_path: Path) -> None:
    index = PageIndex(tmp_path / "below" / "pages.db", home=tmp_path)
    index.open()
    index.close()
    assert stat.S_IMODE((tmp_path / "below" / "pages.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "below").stat().st_mode) == 0o700


def test_a_directory_that_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    above = tmp_path / "store" / ".." / "nodir" / "pages.db"
    index = PageIndex(above, home=tmp_path / "store")
    with pytest.raises(ConfigError, match=r"there is no directory .*/nodir; create it, or correct"):
        index.open()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pages.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"pages\.db cannot be used"):
        PageIndex(tmp_path / "pages.db").open()


def test_an_index_in_another_format_is_refused(tmp_path: Path) -> None:
    index = PageIndex(tmp_path / "pages.db")
    index.open()
    index.close()
    alter(tmp_path / "pages.db", "UPDATE settings SET value = 99 WHERE name = 'format'")
    with pytest.raises(ConfigError, match="format 99"):
        PageIndex(tmp_path / "pages.db").open()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((each, "write sqlite:///absolute/path") for each in ("", "pages.db", "mysql://host/db")),
        *((f"sqlite://{each}", "write sqlite:///absolute/path") for each in ("host/x", "/", "[x")),
        ("sqlite:///%00", "a NUL character"),
    ],
)
def test_an_index_that_cannot_be_named_so_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        path_of(text)
    assert "\n" not in str(caught.value)


@pytest.fixture
def full(connect: Connect) -> PageIndex:
    """An index of four slots, all of them used by entries 0 to 3."""
    index = connect()
    index.provide(4)
    for number in range(4):
        put(index, number)
    return index


@contextmanager
def writer_held_up(full: PageIndex, path: Path) -> Generator[Future[list[Reservation]]]:
    """Hold the index's write lock in another connection, and let a thread wait for it in `reserve`."""
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(full.reserve, 1, LONG_S)
            give_up = time.monotonic() + PATIENCE_S
            while not full._writing.lock.locked():  # pyright: ignore[reportPrivateUsage]
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
    full: PageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each use is due for writing at once, but another process holds the write lock.
    monkeypatch.setattr(page_index, "USES_KEPT_S", 0.0)
    with writer_held_up(full, tmp_path / "pages.db"):
        found = [
            found
            for number in range(4)
            for found in (*full.look_up([key(number)]), *full.confirm([key(number)]))
        ]
        assert len(found) == 8
        assert None not in found
        assert [len(some) for some in full.entries()] == [4]


def test_a_use_that_could_not_be_told_while_another_wrote_counts_all_the_same(
    full: PageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_index, "USES_KEPT_S", 0.0)
    lock = sqlite3.connect(tmp_path / "pages.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    full.confirm([key(0)])
    lock.execute("ROLLBACK")
    lock.close()
    full.reserve(3, LONG_S)
    assert [each is not None for each in full.look_up([key(number) for number in range(4)])] == [
        True,
        False,
        False,
        False,
    ]


def test_uses_that_cannot_be_told_take_no_memory_without_end(
    full: PageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_index, "USES_KEPT_MAX", 8)
    uses = page_index._Uses(  # pyright: ignore[reportPrivateUsage]
        time.time
    )
    assert [uses.note([key(number)]) for number in range(8)] == [False] * 7 + [True]
    for number in range(100):
        uses.note([key(number)])
    assert len(uses.pop_all()) <= 16
    assert not uses


def test_a_full_disk_is_named(full: PageIndex, tmp_path: Path) -> None:
    database: Any = full._writing.database  # pyright: ignore[reportPrivateUsage]
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    full.provide(1 << 20)
    with pytest.raises(StorageError) as raised:
        full.reserve(1 << 16, LONG_S)
    assert f"the filesystem of {tmp_path} is full" in str(raised.value)
    assert "make room on it" in str(raised.value)
    database.execute("PRAGMA max_page_count = 1000000")
    assert len(full.reserve(8, LONG_S)) == 8


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
        PageIndex(tmp_path / "pages.db").open()
    assert (f"the filesystem of {tmp_path} is full" in str(raised.value)) is is_full
    assert ("on a local filesystem" in str(raised.value)) is not is_full


def test_a_database_that_another_is_just_about_to_change_is_waited_for(tmp_path: Path) -> None:
    """If another writer locks the database, a change of the journal mode is retried."""
    path = tmp_path / "full.db"
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
    path = tmp_path / "full.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE there (x)")
    other.execute("BEGIN EXCLUSIVE")
    ours = sqlite3.connect(path, timeout=0.0, isolation_level=None)

    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_wal(ours, 0.02)
    ours.close()
    other.close()
