"""`file://` with a quota and a TTL: the objects that a sweep evicts, and the process that sweeps.

Time is virtual.
"""

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.storage_backends.base import ReadOutcome, Write, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from lockstep.storage_backends.file.contents import BLOCK_BYTES
from lockstep.storage_backends.file.sweep import EMPTY_AGE_S, LOCK, SweepLimits, sweep_store
from lockstep.storage_backends.file.sweeper import Sweeper
from lockstep.storage_backends.records.manifest import Manifest
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import (
    eventually,
    found,
    get,
    get_many,
    object_name,
    opened,
    page,
    put,
    put_many,
    run,
    soon,
    soon_off_loop,
    using,
    wrongly_served,
)
from tests.kit.storage.files import FileStore, failing, files_open_below, flip, sweeper_of

SIZE = 16 << 10
ROOM = SIZE + BLOCK_BYTES
"""Disk space of one object, rounded up to whole blocks."""
LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=2, heads=4, elements=8),))
NOW = time.time() + 1e6
"""A virtual time much later than the mtimes of all test files; tests pass it to sweeps."""
YEARS_S = 1e8
PATIENCE_S = 30.0
"""Timeout in seconds for joining the sweeper's thread; shorter than the sweeper's sleep."""


@contextmanager
def root_of(store: FileStore) -> Generator[int]:
    fd = os.open(store.root, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def fill(store: FileStore, ages_s: list[float]) -> None:
    """Write one object for each age in seconds, and set its mtime that far back."""
    shape = ObjectShape.whole(SIZE)
    with store.files() as files:
        for number, age_s in enumerate(ages_s):
            content = [memoryview(page(number, SIZE))]
            outcome = files.write(object_name(number), content, shape, Stop(soon_off_loop()))
            assert outcome is WriteOutcome.OK
            make_old(store.path(object_name(number)), age_s)


def make_old(path: Path, age_s: float) -> None:
    os.utime(path, (NOW - age_s, NOW - age_s))


def make_really_old(path: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(path, (then, then))


def left(store: FileStore) -> list[int]:
    return [number for number in range(200) if store.path(object_name(number)).exists()]


def sweep(store: FileStore, limits: SweepLimits, stop_after: int | None = None) -> int:
    calls = iter(range(1 << 30))
    with root_of(store) as root_fd:
        return sweep_store(
            root_fd,
            limits,
            now=NOW,
            stop=lambda: stop_after is not None and next(calls) >= stop_after,
        )


def no_turns(sweeper: Sweeper) -> None:
    """Replaces `Sweeper.start` by nothing, because the test runs the sweeps itself."""


@contextmanager
def sweeping(store: FileStore, limits: SweepLimits) -> Generator[Sweeper]:
    """A sweeper without a thread: the test runs its sweeps. Time is the filesystem's clock."""
    with store.files() as files:
        sweeper = files.sweeper(limits)
        try:
            yield sweeper
        finally:
            sweeper.end().result(60)


def test_over_the_quota_the_least_recently_used_go_down_to_the_low_water_mark(
    store: FileStore,
) -> None:
    ages = [float(10 * (number + 1)) for number in range(40)]
    random.Random(4).shuffle(ages)
    fill(store, ages)

    sweep(store, SweepLimits(quota_bytes=20 * ROOM))

    youngest = sorted(range(40), key=lambda number: ages[number])[:18]
    assert left(store) == sorted(youngest)


def test_of_files_of_one_age_no_more_go_than_have_to(store: FileStore) -> None:
    fill(store, [500.0] * 30)

    sweep(store, SweepLimits(quota_bytes=20 * ROOM))

    assert len(left(store)) == 18


def test_a_file_with_holes_does_not_push_the_others_out(store: FileStore) -> None:
    fill(store, [10.0] * 5)
    hole = store.path(object_name(0)).with_name("ff" * 32)
    hole.touch()
    os.truncate(hole, 1 << 40)

    assert sweep(store, SweepLimits(quota_bytes=20 * ROOM)) == 0


def test_what_is_in_quarantine_counts_and_goes_first(store: FileStore) -> None:
    fill(store, [10.0] * 10)
    for number in range(10):
        bad = store.root / "quarantine" / f"{number:02x}"
        bad.write_bytes(bytes(ROOM))
        make_old(bad, 1.0)

    sweep(store, SweepLimits(quota_bytes=12 * ROOM))

    assert len(left(store)) == 10
    assert store.quarantined() == []


def test_what_dead_writers_left_goes_and_what_living_ones_write_stays(store: FileStore) -> None:
    fill(store, [10.0])
    dead, living = (store.root / "temporary" / name for name in ("00", "01"))
    dead.write_bytes(b"x")
    with living.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        sweep(store, SweepLimits(ttl_s=1e9))

    assert store.temporary() == [living]


def test_no_link_is_followed_and_nothing_outside_goes(store: FileStore, tmp_path: Path) -> None:
    fill(store, [1e5])
    outside = tmp_path / "outside" / "ab"
    outside.mkdir(parents=True)
    precious = outside / ("cd" * 32)
    precious.write_bytes(b"precious")
    make_old(precious, 1e5)
    objects = store.root / "objects"
    namespace = next(objects.iterdir())
    (objects / "link").symlink_to(outside.parent)
    (namespace / "li").symlink_to(outside)
    (namespace / "fi").write_bytes(b"no directory")
    (store.path(object_name(0)).parent / "link").symlink_to(precious)

    sweep(store, SweepLimits(ttl_s=1, quota_bytes=1))

    assert left(store) == []
    assert precious.read_bytes() == b"precious"
    assert (store.path(object_name(0)).parent / "link").is_symlink()


def test_what_has_no_name_of_ours_stays_where_our_objects_lie(store: FileStore) -> None:
    """A sweep removes only files with names of objects: the directory may also hold a user's files."""
    fill(store, [1e5])
    ours = store.path(object_name(0))
    others = [ours.with_name("notes.txt"), store.root / "objects" / "shaders" / "ab" / ("cd" * 32)]
    for each in others:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(b"precious")
        make_old(each, 1e5)

    sweep(store, SweepLimits(ttl_s=1, quota_bytes=1))

    assert [each.exists() for each in (ours, *others)] == [False, True, True]


def test_empty_directories_go_when_they_are_old_and_come_back_with_the_next_write(
    store: FileStore,
) -> None:
    fill(store, [])
    digits = store.path(object_name(0)).parent
    young = digits.with_name("ff")
    for directory, age_s in ((digits, 2 * EMPTY_AGE_S), (young, EMPTY_AGE_S / 2)):
        directory.mkdir(parents=True)
        make_old(directory, age_s)

    sweep(store, SweepLimits(ttl_s=1))

    assert list(digits.parent.iterdir()) == [young]
    fill(store, [1.0])
    assert left(store) == [0]


def test_a_pass_that_is_told_to_stop_stops_at_the_next_file(store: FileStore) -> None:
    fill(store, [1e5] * 20)

    removed = sweep(store, SweepLimits(ttl_s=1), stop_after=12)

    assert 0 < removed <= 12
    assert len(left(store)) == 20 - removed


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_ages_and_limits_a_pass_leaves_what_the_definition_says(
    store: FileStore, seed: int
) -> None:
    draw = random.Random(seed)
    ages = [draw.choice([0.1, 1.0, 50.0, 3e3, 1e6]) * draw.uniform(1.0, 2.0) for _ in range(30)]
    ttl_s = draw.choice([None, 60.0, 1e5])
    quota = draw.choice([None, draw.randint(1, 40) * ROOM])
    fill(store, ages)

    sweep(store, SweepLimits(ttl_s=ttl_s, quota_bytes=quota))

    kept = left(store)
    assert all(ttl_s is None or ages[number] <= ttl_s for number in kept)
    assert quota is None or len(kept) * ROOM <= quota
    gone = [n for n in range(30) if n not in kept and (ttl_s is None or ages[n] <= ttl_s)]
    assert all(ages[one] >= ages[two] for one in gone for two in kept)


def test_only_one_sweeps_at_a_time_and_the_others_go_on(store: FileStore) -> None:
    fill(store, [1e5])
    make_really_old(store.path(object_name(0)), 1e5)
    limits = SweepLimits(ttl_s=1)
    with sweeping(store, limits) as sweeper:
        with (store.root / LOCK).open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert sweeper.turn(wanted=True) is None
            assert left(store) == [0]
        assert sweeper.turn(wanted=True) == 1


def test_of_many_processes_one_walks_in_each_interval_unless_much_was_written(
    store: FileStore,
) -> None:
    limits = SweepLimits(quota_bytes=1 << 30)
    with sweeping(store, limits) as first, sweeping(store, limits) as second:
        assert first.turn(wanted=False) is not None
        assert second.turn(wanted=False) is None
        assert second.turn(wanted=True) is not None
        # Only a sweep may change the lock file's mtime: if the check for a due sweep changed the mtime,
        # the next sweep would be late.
        ended = (store.root / LOCK).stat().st_mtime_ns
        assert second.turn(wanted=False) is None
        assert (store.root / LOCK).stat().st_mtime_ns == ended
        make_really_old(store.root / LOCK, first.interval_s)
        assert second.turn(wanted=False) is not None


def test_a_pass_that_ended_in_the_future_by_a_wrong_clock_puts_off_nobody(store: FileStore) -> None:
    with sweeping(store, SweepLimits(ttl_s=100)) as sweeper:
        assert sweeper.turn(wanted=False) is not None
        make_really_old(store.root / LOCK, -YEARS_S)
        assert sweeper.turn(wanted=False) is not None


def test_without_locks_each_sweeps_for_itself(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [1e5])
    make_really_old(store.path(object_name(0)), 1e5)
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with sweeping(store, SweepLimits(ttl_s=1)) as sweeper:
        assert sweeper.turn(wanted=True) is not None
    assert left(store) == []


async def test_a_read_through_the_store_marks_use_and_a_write_that_finds_the_object_too(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweeper, "start", no_turns)
    fill(store, [1e5] * 4)
    for number in range(4):
        make_really_old(store.path(object_name(number)), 1e5)

    async with using(FileBackend(store.root, FileOptions(ttl_s=1e9))) as backend:
        assert (await get(backend, object_name(0), SIZE))[0] is ReadOutcome.OK
        assert await put(backend, object_name(2), page(2, SIZE)) is WriteOutcome.PRESENT
        # Recording the use of an object that was removed after its read has no effect.
        sweeper_of(backend).used([object_name(77)])
        sweeper_of(backend).turn(wanted=True)
    with sweeping(store, SweepLimits(ttl_s=1000)) as sweeper:
        sweeper.turn(wanted=True)
    assert left(store) == [0, 2]


async def test_a_store_that_has_swept_says_of_what_it_has_removed_that_it_is_missing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweeper, "start", no_turns)
    names = [object_name(number) for number in range(2)]

    async with using(FileBackend(store.root, FileOptions(ttl_s=1000))) as backend:
        await put_many(backend, range(2), SIZE)
        before = await backend.exists(names, deadline=soon())
        make_really_old(store.path(names[0]), 1e5)
        sweeper_of(backend).turn(wanted=True)
        after = await backend.exists(names, deadline=soon())

    assert (before, after) == ([True, True], [False, True])


async def test_a_process_whose_clock_is_ahead_takes_nothing_away_and_marks_nothing_beyond_its_time(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [0.0] * 3)
    paths = [store.path(object_name(number)) for number in range(3)]
    for path in paths:
        make_really_old(path, 10.0)
    real_time = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real_time() + YEARS_S)
        patch.setattr(Sweeper, "start", no_turns)
        async with using(FileBackend(store.root, FileOptions(ttl_s=3600))) as backend:
            assert (await get(backend, object_name(0), SIZE))[0] is ReadOutcome.OK
            assert sweeper_of(backend).turn(wanted=True) is not None
    assert left(store) == [0, 1, 2]
    assert paths[0].stat().st_mtime > paths[1].stat().st_mtime
    assert paths[0].stat().st_mtime < time.time() + 3600


def test_what_was_marked_by_a_clock_that_was_years_ahead_is_as_good_as_new_and_ages_from_then(
    store: FileStore,
) -> None:
    fill(store, [-YEARS_S, 10.0])
    bad = store.root / "quarantine" / "00"
    bad.write_bytes(b"x")
    make_old(bad, -YEARS_S)

    assert sweep(store, SweepLimits(ttl_s=100)) == 0

    # The first sweep set the future mtimes to the filesystem's time. That is far before the virtual
    # time, so the second sweep removes these files.
    assert sweep(store, SweepLimits(ttl_s=100)) == 2
    assert left(store) == [1]


@pytest.mark.parametrize("limits", [SweepLimits(ttl_s=1e9), SweepLimits(quota_bytes=1 << 40)])
def test_a_directory_in_quarantine_goes_with_all_that_is_in_it_when_it_is_old(
    store: FileStore, tmp_path: Path, limits: SweepLimits
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    fill(store, [1.0])
    for name, age_s in (("00", 2 * EMPTY_AGE_S), ("01", EMPTY_AGE_S / 2)):
        directory = store.root / "quarantine" / name
        deep = directory.joinpath(*(["deep"] * 30))
        deep.mkdir(parents=True)
        for number in range(5):
            (deep / f"{number}").write_bytes(b"x")
            (deep.parent / f"{number}").write_bytes(b"x")
        (deep / "link").symlink_to(outside)
        make_old(directory, age_s)

    sweep(store, limits)

    assert [path.name for path in store.quarantined()] == ["01"]
    assert (outside / "precious").exists()
    assert left(store) == [0]


@pytest.mark.parametrize("nbytes", [100, SIZE])
async def test_much_writing_wakes_the_sweeper_and_the_quota_is_kept(
    store: FileStore, nbytes: int
) -> None:
    room = BLOCK_BYTES + max(nbytes, BLOCK_BYTES)
    quota = 40 * room

    async def is_kept() -> bool:
        return len(left(store)) * room <= quota

    async with using(FileBackend(store.root, FileOptions(quota_bytes=quota))) as backend:
        written = {await put(backend, object_name(n), page(n, nbytes)) for n in range(120)}
        assert written == {WriteOutcome.OK}
        await eventually(is_kept)
    # The sweeper may still be evicting, because a sweep only ends at a low watermark below the quota.
    async with opened(store) as reader:
        assert await get_many(reader, left(store), nbytes) == found(left(store), nbytes)


@contextmanager
def all_swept_away(store: FileStore) -> Generator[None]:
    """Sweep all objects and empty directories repeatedly while the context is open."""
    ended = threading.Event()

    def sweep_all() -> None:
        with root_of(store) as root_fd:
            while not ended.is_set():
                later = time.time() + 2 * EMPTY_AGE_S
                sweep_store(root_fd, SweepLimits(ttl_s=1), now=later, stop=ended.is_set)

    thread = threading.Thread(target=sweep_all)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def test_reading_and_writing_go_on_while_everything_is_swept_away(store: FileStore) -> None:
    """During sweeps that remove objects, each read is right or a miss, and each write succeeds."""
    batches = [range(start, start + 20) for start in range(0, 200, 20)]
    async with opened(store) as backend:
        with all_swept_away(store):
            results = [
                (await put_many(backend, numbers), await get_many(backend, numbers))
                for numbers in batches
            ]

    assert [written for written, _ in results] == [[WriteOutcome.OK] * 20] * 10
    read = list(chain.from_iterable(read for _, read in results))
    assert {outcome for outcome, _ in read} <= {ReadOutcome.OK, ReadOutcome.MISSING}
    assert wrongly_served(range(200), read) == []
    assert store.quarantined() == []


async def test_closing_ends_the_sweep_and_gives_its_descriptors_back(store: FileStore) -> None:
    def sweepers() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("lockstep-sweep")}

    before = sweepers()
    backend = FileBackend(store.root, FileOptions(ttl_s=3600))
    await backend.open()
    (thread,) = sweepers() - before
    assert files_open_below(store.root)
    await backend.close()
    assert files_open_below(store.root) == []
    # The sweeper's thread closes its descriptors just before it ends.
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("quota_gib=1&quota_bytes=5", "are both given"),
        ("quota_gib=-1", "quota_gib is '-1', must be at least 0$"),
        ("ttl_s=0.5", "ttl_s is '0.5', must be at least 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_backend(f"file:///nowhere?{options}")


@pytest.mark.parametrize(
    ("options", "limits", "limit_text"),
    [
        ("quota_gib=1.5&ttl_s=60", SweepLimits(quota_bytes=3 << 29, ttl_s=60.0), "1.5 GiB"),
        ("quota_gib=1e-15", SweepLimits(quota_bytes=1), "0.0 GiB"),
        (
            "",
            SweepLimits(),
            "half of its filesystem's free space, with its own files counted as free; ",
        ),
        ("quota_gib=0", SweepLimits(quota_bytes=0), "its whole filesystem"),
    ],
)
async def test_limits_come_from_the_uri_and_are_said_when_the_store_opens(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: str,
    limits: SweepLimits,
    limit_text: str,
) -> None:
    caplog.set_level("INFO", "lockstep")
    uri = f"{(tmp_path / 'kv').as_uri()}?{options}"
    backend = make_backend(uri)
    assert isinstance(backend, FileBackend)
    async with using(backend):
        sweeps = backend._sweeper is not None  # pyright: ignore[reportPrivateUsage]

    assert backend._limits == limits  # pyright: ignore[reportPrivateUsage]
    assert sweeps is (limits.quota_bytes != 0)
    assert caplog.messages[0].startswith(f"store {uri} may hold {limit_text}")


def filesystem_of(store: FileStore, objects: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a filesystem with room for `objects` objects, including those already in the store."""

    def statvfs(_: object) -> os.statvfs_result:
        used = sum(each.stat().st_blocks for each in store.root.rglob("*") if each.is_file())
        blocks = objects * ROOM // 512
        free = max(0, blocks - used)
        return os.statvfs_result((512, 512, blocks, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.mark.parametrize(
    ("room", "kept"),
    [(60, 27), (90, 40), (40, 18), (0, 40)],
    ids=["more than half", "less than half", "full", "a filesystem that does not say"],
)
def test_without_a_quota_a_store_keeps_to_half_of_what_its_filesystem_has_without_it(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, room: int, kept: int
) -> None:
    fill(store, [float(10 * (number + 1)) for number in range(40)])
    filesystem_of(store, room, monkeypatch)

    for _ in range(3):
        sweep(store, SweepLimits())

    assert left(store) == list(range(kept))


def test_a_store_on_a_filesystem_that_is_half_empty_is_not_walked(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, [1.0] * 40)
    with sweeping(store, SweepLimits()) as sweeper:
        filesystem_of(store, 200, monkeypatch)
        assert sweeper.turn(wanted=True) is None
        assert not (store.root / LOCK).exists()
        filesystem_of(store, 60, monkeypatch)
        assert sweeper.turn(wanted=True) == 13


async def test_a_store_without_a_quota_never_fills_its_filesystem(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweeper, "start", no_turns)
    filesystem_of(store, 100, monkeypatch)
    wanted = threading.Event()
    async with using(FileBackend(store.root)) as backend:
        sweeper = sweeper_of(backend)
        monkeypatch.setattr(sweeper, "_wake", wanted)
        sweeper.turn(wanted=True)
        held = [await held_after(backend, store, number, wanted) for number in range(150)]

    assert 45 <= max(held) <= 50


async def held_after(
    backend: FileBackend, store: FileStore, number: int, wanted: threading.Event
) -> int:
    """Write an object, run the sweep that the write requests, and return the number of objects left."""
    assert await put(backend, object_name(number), page(number, SIZE)) is WriteOutcome.OK
    if wanted.is_set():
        wanted.clear()
        sweeper_of(backend).turn(wanted=True)
    return len(left(store))


def records(namespace: str, models: int) -> list[Write]:
    """Return writes of `models` manifests and of two marks, one for each of two TP sizes."""
    writes: list[Write] = []
    for number in range(models):
        manifest = Manifest(model=f"m{number}", weights_version="1", layouts={"kv": LAYOUT})
        content = memoryview(manifest.encode())
        writes.append(Write(manifest.name, (content,), ObjectShape.whole(16 << 10)))
    for size in (1, 2):
        mark = ObjectName(namespace, namespace, "sharding", f"stage0of1.tp{size}")
        writes.append(Write(mark, (memoryview(b"\1"),), ObjectShape.whole(1)))
    return writes


def keep_records(store: FileStore, models: int = 1) -> list[Path]:
    writes = records(object_name(0).namespace, models)

    async def write() -> None:
        async with opened(store) as backend:
            assert set(await backend.write(writes, deadline=soon())) == {WriteOutcome.OK}

    run(write())
    paths = [store.path(write.name) for write in writes]
    for path in paths:
        make_old(path, 1e9)
    return paths


@pytest.mark.parametrize("limits", [SweepLimits(ttl_s=100), SweepLimits(quota_bytes=5 * ROOM)])
def test_records_stay_whatever_their_age_since_pages_are_found_by_them(
    store: FileStore, limits: SweepLimits
) -> None:
    kept = keep_records(store)
    fill(store, [10.0, 20.0] + [1e5] * 30)

    sweep(store, limits)

    assert all(path.exists() for path in kept)
    assert left(store) == [0, 1]


def test_the_room_of_records_counts_and_is_not_taken_for_room_that_can_be_had(
    store: FileStore,
) -> None:
    kept = keep_records(store, models=12)
    fill(store, [float(10 * (number + 1)) for number in range(40)])

    sweep(store, SweepLimits(quota_bytes=30 * ROOM))

    assert all(path.exists() for path in kept)
    # Manifests and marks count towards the quota. Those in this store take the room of about 13 pages.
    assert left(store) == list(range(14))


def test_what_only_claims_to_be_a_record_goes(store: FileStore) -> None:
    kept = keep_records(store)
    copies = [store.path(object_name(number)) for number in (1, 2)]
    for one, other in zip(kept, copies, strict=False):
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(one.read_bytes())
    flip(kept[2], 8 * 100)
    for path in (*copies, kept[2]):
        make_old(path, 1e9)

    sweep(store, SweepLimits(ttl_s=100))

    assert [path.exists() for path in kept] == [True, True, False]
    assert left(store) == []


def test_a_record_that_cannot_be_read_now_stays(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep_records(store)

    monkeypatch.setattr(os, "preadv", failing())
    sweep(store, SweepLimits(ttl_s=100))
    assert all(path.exists() for path in kept)
