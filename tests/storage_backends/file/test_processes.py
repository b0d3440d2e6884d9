"""`file://` among processes: killed writers, racing writers, and a full disk."""

import shlex
import sys

import pytest

from lockstep.storage_backends.base import ReadOutcome, StorageBackend
from tests.kit.programs import program
from tests.kit.storage.calls import (
    EVERY,
    Found,
    full_page,
    get,
    get_columns,
    object_name,
    opened,
    page,
    reading,
)
from tests.kit.storage.files import FileStore
from tests.kit.storage.racing import finish, race, start, wins_found
from tests.kit.storage.writers import PAGE_BYTES, PAGES

PROGRAM = "tests.kit.storage.writers"
MODES = ["unnamed", "named"]


async def left_by(backend: StorageBackend, kill: int) -> list[Found]:
    """What the writer of this number had written when it was killed."""
    read: list[Found] = []
    for number in range(kill * 1000, kill * 1000 + 1000):
        read.append(await get(backend, object_name(number), PAGE_BYTES))
        if read[-1][0] is ReadOutcome.MISSING:
            break
    return read[:-1]


@pytest.mark.parametrize("kills", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
async def test_a_writer_killed_at_any_moment_leaves_whole_pages_and_nothing_else(
    store: FileStore, mode: str, kills: int
) -> None:
    seed = 11
    # Shown if the test fails; the moments of the kills are drawn from the seed.
    command = program(PROGRAM, "killed", "DIRECTORY", mode, seed, kills)
    sys.stdout.write(f"replay: {shlex.join(command)}\n")
    finish(start(PROGRAM, "killed", store.root, mode, seed, kills))

    written = len(store.objects())
    async with opened(store) as backend:
        assert store.temporary() == []
        left = [await left_by(backend, kill) for kill in range(kills)]
        assert backend.counters().reads_corrupt == 0
    contents = [(ReadOutcome.OK, page(number, PAGE_BYTES)) for number in range(PAGES)]
    assert left == [[contents[at % PAGES] for at in range(len(each))] for each in left]
    assert sum(len(each) for each in left) == written >= kills


@pytest.mark.parametrize("names", [48, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
async def test_of_two_processes_that_write_a_name_exactly_one_wins(
    store: FileStore, mode: str, names: int
) -> None:
    wins = race(PROGRAM, "racing", store.root, mode, names=names)

    assert sum(wins) == names
    assert await wins_found(store, names, PAGE_BYTES) == wins


@pytest.mark.parametrize("names", [32, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
async def test_of_processes_that_bring_different_columns_to_a_name_none_loses_its_own(
    store: FileStore, mode: str, names: int
) -> None:
    writers = [start(PROGRAM, "columns", store.root, mode, column, names) for column in range(3)]
    assert [finish(writer) for writer in writers] == ["0\n"] * 3

    async with opened(store) as backend:
        assert store.temporary() == []
        read = [await get_columns(backend, object_name(n), EVERY) for n in range(names)]
        assert read == [(ReadOutcome.OK, full_page(EVERY))] * names


@pytest.mark.parametrize("mode", MODES)
async def test_a_full_disk_fails_the_keys_without_room_and_leaves_nothing_of_them(
    store: FileStore, mode: str
) -> None:
    assert finish(start(PROGRAM, "full", store.root, mode)) == "['OK', 'FAILED', 'OK']\n"
    assert len(store.objects()) == 2
    assert store.temporary() == []

    async with opened(store) as backend:
        assert await get(backend, object_name(0)) == (ReadOutcome.OK, page(0))
        buffer = bytearray(1 << 20)
        reads = [reading(object_name(1), buffer)]
        assert await backend.read(reads, deadline=float("inf")) == [ReadOutcome.MISSING]
