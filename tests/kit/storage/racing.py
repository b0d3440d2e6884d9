"""Processes that write the same names at once, and which of them each name belongs to afterwards."""

import subprocess

from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from tests.kit.programs import program
from tests.kit.storage.calls import (
    StoreUnderTest,
    get_many,
    object_name,
    opened,
    page,
    soon,
    writing,
)


def start(name: str, *arguments: object) -> "subprocess.Popen[str]":
    """Begin a module of the tests as a process of its own."""
    return subprocess.Popen(program(name, *arguments), stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for its end, which must be a good one, and return what it has said."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output


async def win(backend: StorageBackend, writer: int, names: int, nbytes: int) -> int:
    """Write so many names, a few at a time, with this writer's page; return how often it was first."""
    content, won = page(writer, nbytes), 0
    for start in range(0, names, 4):
        writes = [writing(object_name(n), content) for n in range(start, min(start + 4, names))]
        won += (await backend.write(writes, deadline=soon())).count(WriteOutcome.OK)
    return won


def race(name: str, *arguments: object, names: int) -> list[int]:
    """Let writers 0 and 1 write so many names; return how often each says that it has won."""
    writers = [start(name, *arguments, writer, names) for writer in range(2)]
    return [int(finish(writer)) for writer in writers]


async def wins_found(store: StoreUnderTest, names: int, nbytes: int) -> list[int]:
    """How many of the names hold the page of writer 0, and how many that of writer 1."""
    async with opened(store) as backend:
        read = await get_many(backend, range(names), nbytes)
    return [read.count((ReadOutcome.OK, page(writer, nbytes))) for writer in range(2)]
