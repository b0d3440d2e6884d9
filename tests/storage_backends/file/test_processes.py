"""`file://` among processes: killed writers, racing writers, and a full disk."""

import shlex
import subprocess
import sys

import pytest

from lockstep.storage_backends.base import ReadOutcome
from tests.kit.programs import program
from tests.kit.storage.calls import (
    EVERY,
    full_page,
    get,
    get_columns,
    object_name,
    opened,
    page,
    reading,
)
from tests.kit.storage.files import FileStore
from tests.kit.storage.writers import PAGE_BYTES, PAGES

PROGRAM = "tests.kit.storage.writers"
MODES = ["unnamed", "named"]


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = program(PROGRAM, *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


@pytest.mark.parametrize("kills", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
async def test_a_writer_killed_at_any_moment_leaves_whole_pages_and_nothing_else(
    store: FileStore, mode: str, kills: int
) -> None:
    seed = 11
    # Shown if the test fails; the moments of the kills are drawn from the seed.
    command = program(PROGRAM, "killed", "DIRECTORY", mode, seed, kills)
    sys.stdout.write(f"replay: {shlex.join(command)}\n")
    finish(start("killed", store.root, mode, seed, kills))

    written = len(store.objects())
    found = 0
    async with opened(store) as backend:
        assert store.temporary() == []
        contents = [page(number, PAGE_BYTES) for number in range(PAGES)]
        for kill in range(kills):
            for number in range(kill * 1000, kill * 1000 + 1000):
                outcome, buffer = await get(backend, object_name(number), PAGE_BYTES)
                if outcome is ReadOutcome.MISSING:
                    break
                assert outcome is ReadOutcome.OK
                assert buffer == contents[number % PAGES]
                found += 1
        assert backend.counters().reads_corrupt == 0
    assert found == written >= kills


@pytest.mark.parametrize("names", [48, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
async def test_of_two_processes_that_write_a_name_exactly_one_wins(
    store: FileStore, mode: str, names: int
) -> None:
    writers = [start("racing", store.root, mode, writer, names) for writer in range(2)]
    wins = [int(finish(writer)) for writer in writers]
    assert sum(wins) == names

    async with opened(store) as backend:
        contents = [page(writer, PAGE_BYTES) for writer in range(2)]
        found = [0, 0]
        for number in range(names):
            outcome, buffer = await get(backend, object_name(number), PAGE_BYTES)
            assert outcome is ReadOutcome.OK
            found[contents.index(buffer)] += 1
        assert found == wins


@pytest.mark.parametrize("names", [32, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
async def test_of_processes_that_bring_different_columns_to_a_name_none_loses_its_own(
    store: FileStore, mode: str, names: int
) -> None:
    writers = [start("columns", store.root, mode, column, names) for column in range(3)]
    assert [finish(writer) for writer in writers] == ["0\n"] * 3

    async with opened(store) as backend:
        assert store.temporary() == []
        for number in range(names):
            assert await get_columns(backend, object_name(number), EVERY) == (
                ReadOutcome.OK,
                full_page(EVERY),
            )


@pytest.mark.parametrize("mode", MODES)
async def test_a_full_disk_fails_the_keys_without_room_and_leaves_nothing_of_them(
    store: FileStore, mode: str
) -> None:
    assert finish(start("full", store.root, mode)) == "['OK', 'FAILED', 'OK']\n"
    assert len(store.objects()) == 2
    assert store.temporary() == []

    async with opened(store) as backend:
        assert await get(backend, object_name(0)) == (ReadOutcome.OK, page(0))
        buffer = bytearray(1 << 20)
        reads = [reading(object_name(1), buffer)]
        assert await backend.read(reads, deadline=float("inf")) == [ReadOutcome.MISSING]
