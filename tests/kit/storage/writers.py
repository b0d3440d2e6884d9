"""Processes that write to a store, for tests that kill them, race them or starve them of room.

python -m tests.kit.storage.writers killed <directory> <named> <seed> <kills>
python -m tests.kit.storage.writers racing <directory> <named> <writer> <names>
python -m tests.kit.storage.writers columns <directory> <named> <column> <names>
python -m tests.kit.storage.writers full <directory> <named>
"""

import asyncio
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend
from lockstep.storage_backends.file.objects import Durability, ObjectFiles
from lockstep.storage_backends.thread_calls import Stop
from tests.kit.storage.calls import (
    columns,
    full_page,
    object_name,
    page,
    soon,
    soon_off_loop,
    using,
    writing,
)
from tests.kit.storage.files import open_without_unnamed_files
from tests.kit.storage.racing import win

PAGES = 8
PAGE_BYTES = 200_000


def write_and_be_killed(root: Path, seed: int, kills: int) -> None:
    """Let one writer after the other be killed at a random moment, after a drawn number of pages.

    Each has 1,000 names of its own, which it writes in order.
    """
    draw = random.Random(seed)
    # Many names share few contents, because making content is slower than writing it.
    pages = [memoryview(page(number, PAGE_BYTES)) for number in range(PAGES)]
    for kill in range(kills):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            files = ObjectFiles(root, Durability.NONE, direct=False)
            files.open()
            stop, shape = Stop(soon_off_loop()), ObjectShape.whole(PAGE_BYTES)
            for number in range(kill * 1000, kill * 1000 + 1000):
                files.write(object_name(number), [pages[number % PAGES]], shape, stop)
                os.write(tell, b".")
            os._exit(0)
        os.close(tell)
        for _ in range(draw.randint(1, 12)):
            os.read(told, 1)
        # About as long as one page takes, so that every moment of its writing has its turn.
        time.sleep(draw.uniform(0.0, 0.0003))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)


async def race(root: Path, writer: int, names: int) -> None:
    """Write every name with content that tells who wrote it, and print how often this one won."""
    async with using(FileBackend(root, threads=2)) as backend:
        sys.stdout.write(f"{await win(backend, writer, names, PAGE_BYTES)}\n")


async def bring(root: Path, column: int, names: int) -> None:
    """Write every name with one optional column, and print how often nothing was stored."""
    present, failed = 1 << column, 0
    content = full_page(present)
    async with using(FileBackend(root, threads=2)) as backend:
        for start in range(0, names, 4):
            writes = [
                writing(object_name(number), content, columns(present))
                for number in range(start, start + 4)
            ]
            outcomes = await backend.write(writes, deadline=soon())
            failed += sum(outcome is not WriteOutcome.OK for outcome in outcomes)
    sys.stdout.write(f"{failed}\n")


async def fill(root: Path) -> None:
    """Write pages with room for the first and the last of three, and print what becomes of each."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    sizes = (16 << 10, 1 << 20, 60 << 10)
    async with using(FileBackend(root)) as backend:
        writes = [writing(object_name(n), page(n, size)) for n, size in enumerate(sizes)]
        outcomes = await backend.write(writes, deadline=soon())
    sys.stdout.write(f"{[outcome.name for outcome in outcomes]}\n")


def main() -> None:
    what, root, named, *numbers = sys.argv[1:]
    if named == "named":
        os.open = open_without_unnamed_files
    match what:
        case "killed":
            write_and_be_killed(Path(root), int(numbers[0]), int(numbers[1]))
        case "racing":
            asyncio.run(race(Path(root), int(numbers[0]), int(numbers[1])))
        case "columns":
            asyncio.run(bring(Path(root), int(numbers[0]), int(numbers[1])))
        case _:
            asyncio.run(fill(Path(root)))


if __name__ == "__main__":
    main()
