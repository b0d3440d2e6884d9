"""Processes that write the same names to one store, and helpers to start writers and wait for them.

python -m tests.kit.storage.racing <directory> named|unnamed <writer> <names>

A writer prints how often it was the first.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from lockstep.storage_backends.base import WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from tests.kit.programs import program
from tests.kit.storage.calls import object_name, page, soon, using, writing
from tests.kit.storage.files import open_without_unnamed_files

PAGE_BYTES = 200_000


def start(name: str, *arguments: object) -> "subprocess.Popen[str]":
    """Begin a module of the tests as a process of its own."""
    return subprocess.Popen(program(name, *arguments), stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for its end, which must be a good one, and return what it has said."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output


async def win(root: Path, writer: int, names: int) -> int:
    """Write so many names, a few at a time, with this writer's page; return how often it was first."""
    content, won = page(writer, PAGE_BYTES), 0
    async with using(FileBackend(root, FileOptions(threads=2))) as backend:
        for first in range(0, names, 4):
            writes = [writing(object_name(n), content) for n in range(first, min(first + 4, names))]
            won += (await backend.write(writes, deadline=soon())).count(WriteOutcome.OK)
    return won


def main() -> None:
    root, mode, writer, names = sys.argv[1:]
    if mode == "named":
        os.open = open_without_unnamed_files
    sys.stdout.write(f"{asyncio.run(win(Path(root), int(writer), int(names)))}\n")


if __name__ == "__main__":
    main()
