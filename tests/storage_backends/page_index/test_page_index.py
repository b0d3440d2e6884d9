"""The promises of a page index, held by every database."""

import itertools
import stat
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.storage_backends.page_index.contract import (
    NOTHING,
    Commit,
    CommitOutcome,
    Entry,
    PageIndex,
    Reservation,
    Settings,
)
from lockstep.storage_backends.page_index.opening import make_index
from tests.kit.servers.redis_server import RedisServer
from tests.kit.storage.index_entries import LONG_S, alter, entry, key

_numbers = itertools.count()

Connect = Callable[[], PageIndex]
"""Opens one more connection to the index under test, as another process would."""


@pytest.fixture(params=["sqlite", "redis"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Connect]:
    opened: list[PageIndex] = []
    if request.param == "sqlite":
        text = f"sqlite://{tmp_path}/pages.db"
    else:
        text = request.getfixturevalue("redis_server").url()
    name = f"test-{next(_numbers)}"

    def one_more() -> PageIndex:
        index = make_index(text, name)
        index.open()
        opened.append(index)
        return index

    yield one_more
    for index in opened:
        index.close()


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
    assert reader.look_up([key(2), key(1)]) == [
        None,
        entry(1, reservation, present=(1 << 64) - 1),
    ]


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
    # The slots of the old entry and of the one who came late are free, and nothing is evicted.
    assert len(index.reserve(2, LONG_S)) == 2
    assert index.look_up([key(1)]) != [None]


def test_a_replacement_of_what_is_gone_is_refused(connect: Connect) -> None:
    index = connect()
    index.provide(2)
    old = put(index, 1)
    (reservation,) = index.reserve(1, LONG_S)
    index.remove([key(1)])
    assert commit(index, 1, reservation, replaces=old.generation) is CommitOutcome.STANDS
    assert index.look_up([key(1)]) == [None]


def test_when_all_slots_are_used_the_least_recently_used_entries_give_way(
    connect: Connect,
) -> None:
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
        # Its use, noted at any time, does not make it one of those that give way.
        confirmed += index.confirm([key(0)])
    assert confirmed == [record] * 8
    told = {used.entry.key: used.age_s for some in index.entries() for used in some}
    assert set(told) == {key(0), key(7), key(8)}
    assert told[key(0)] is None
    assert told[key(8)] is not None
    index.remove([key(0)])
    assert index.look_up([key(0), key(7), key(8)])[0] is None
    assert len(index.reserve(3, LONG_S)) == 3
    assert index.reserve(1, LONG_S) == []


def test_an_index_full_of_what_is_kept_lends_nothing(connect: Connect) -> None:
    index = connect()
    index.provide(2)
    kept = [put(index, number, kept=True) for number in range(2)]
    index.confirm([key(0), key(1)])
    index.close()
    index = connect()
    assert index.reserve(1, LONG_S) == []
    assert index.look_up([key(0), key(1)]) == kept
    index.drop(kept[:1])
    assert len(index.reserve(2, LONG_S)) == 1


def test_what_is_lent_out_is_never_evicted(connect: Connect) -> None:
    index = connect()
    index.provide(3)
    lent = index.reserve(2, LONG_S)
    for number in range(5):
        put(index, number)
    assert [commit(index, 10 + each.slot, each) for each in lent] == [CommitOutcome.DONE] * 2


def test_a_generation_that_has_changed_is_told_to_whoever_confirms(connect: Connect) -> None:
    reader, writer = connect(), connect()
    writer.provide(1)
    old = put(writer, 1)
    assert reader.look_up([key(1)]) == [old]
    put(writer, 2)
    new = put(writer, 1)
    assert reader.confirm([key(1)]) == [new]
    assert new.generation != old.generation


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


def test_whoever_comes_first_decides_the_settings_and_the_name(connect: Connect) -> None:
    first, second = connect(), connect()
    assert first.agree(Settings(8192, 10)) == Settings(8192, 10)
    assert second.agree(Settings(4096, 20)) == Settings(8192, 10)
    assert first.identity("one") == "one"
    assert second.identity("two") == "one"


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
    told = [used for some in index.entries() for used in some]
    assert sorted(used.entry.key for used in told) == sorted(keys[50:])
    assert all(used.age_s is not None and used.age_s < LONG_S for used in told)
    index.remove(keys)
    assert list(index.entries()) == []
    assert index.look_up(keys) == [None] * len(keys)


def test_an_empty_batch_is_nothing(connect: Connect) -> None:
    index = connect()
    assert (index.look_up([]), index.confirm([]), index.commit([])) == ([], [], [])
    assert index.reserve(3, LONG_S) == []


def test_a_closed_index_says_so(connect: Connect) -> None:
    index = connect()
    index.close()
    index.close()
    with pytest.raises(StorageError, match="not open"):
        index.look_up([key(1)])


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
    index = make_index(f"sqlite://{tmp_path}/below/pages.db", "", home=tmp_path)
    index.open()
    index.close()
    assert stat.S_IMODE((tmp_path / "below" / "pages.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "below").stat().st_mode) == 0o700


@pytest.mark.parametrize("home", [None, "store"])
def test_a_directory_that_is_not_there_is_named_and_not_made(
    tmp_path: Path, home: str | None
) -> None:
    index = make_index(
        f"sqlite://{tmp_path}/store/../nodir/pages.db",
        "",
        home=None if home is None else tmp_path / home,
    )
    with pytest.raises(ConfigError, match=r"there is no directory .*/nodir; make it, or mend"):
        index.open()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pages.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"pages\.db cannot be used"):
        make_index(f"sqlite://{tmp_path}/pages.db", "").open()


def test_an_index_in_another_format_is_refused(tmp_path: Path) -> None:
    index = make_index(f"sqlite://{tmp_path}/pages.db", "")
    index.open()
    index.close()
    alter(tmp_path / "pages.db", "UPDATE settings SET value = 99 WHERE name = 'format'")
    with pytest.raises(ConfigError, match="format 99"):
        make_index(f"sqlite://{tmp_path}/pages.db", "").open()


@pytest.mark.parametrize(
    "text", ["", "pages.db", "sqlite://host/path", "sqlite:///", "mysql://host/db", "redis"]
)
def test_an_index_that_cannot_be_named_so_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write sqlite:///absolute/path"):
        make_index(text, "")


def test_a_redis_server_that_is_not_there_is_refused_and_its_password_is_not_told() -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        make_index("redis://user:secret@127.0.0.1:1/0", "x").open()
    assert "secret" not in str(caught.value)


def test_a_redis_server_that_dies_costs_errors_and_one_that_has_lost_all_is_an_empty_index() -> (
    None
):
    with RedisServer() as server:
        index = make_index(server.url(), "x")
        index.open()
        index.provide(2)
        old = put(index, 1)
        server.kill()
        with pytest.raises(StorageError, match="does not answer"):
            index.look_up([key(1)])
        server.start()
        assert index.look_up([key(1)]) == [None]
        assert index.reserve(1, LONG_S) == []
        index.provide(2)
        assert put(index, 1).generation > old.generation
        index.close()
