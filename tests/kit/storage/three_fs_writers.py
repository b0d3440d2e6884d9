"""Processes that are killed while they write to a `3fs://` store.

python -m tests.kit.storage.three_fs_writers <directory> <index>

The arguments are the paths of the store's directory and of its index file.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.storage_backends.three_fs import files as three_fs_files
from lockstep.storage_backends.three_fs.page_index import PageIndex
from tests.kit.storage.calls import object_name, page, put
from tests.kit.storage.three_fs import SlotStore

PAGE_BYTES = 100_000
SLOT_BYTES = 128 << 10
FILE_SLOTS = 2
FILES = 8
PHASES = (
    "after reserving",
    "between making a file and giving it its length",
    "in the middle of writing",
    "before committing",
    "after committing",
)
FIRST_KILLED = 100
"""Number of the object that the first writer writes. Each later writer writes the next object."""

_pwritev = os.pwritev


def store_at(root: Path, index: Path) -> SlotStore:
    return SlotStore(root, index, slot_bytes=SLOT_BYTES, file_slots=FILE_SLOTS, files=FILES)


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def write_a_part_and_die(fd: int, views: Sequence[memoryview], offset: int) -> int:
    _pwritev(fd, [b"".join(views)[:50_000]], offset)
    die()
    raise AssertionError


def wrap(index: PageIndex, method: str, *, before: bool) -> None:
    """Replace a method of the index by one that kills this process, before or after the real call."""
    call: Callable[..., Any] = getattr(index, method)

    def and_die(*arguments: Any) -> Any:
        if before:
            die()
        call(*arguments)
        die()

    setattr(index, method, and_die)


def replace(module: ModuleType, function: str, by: Callable[..., Any]) -> None:
    setattr(module, function, by)


async def write_and_die(store: SlotStore, phase: str, number: int) -> None:
    index = store.make_index()
    match phase:
        case "after reserving":
            wrap(index, "reserve", before=False)
        case "in the middle of writing":
            replace(os, "pwritev", write_a_part_and_die)
        case "before committing":
            wrap(index, "commit", before=True)
        case "after committing":
            wrap(index, "commit", before=False)
        case _:
            replace(three_fs_files, "allocate", die)
    backend = store.backend(index)
    await backend.open()
    await put(backend, object_name(number), page(number, PAGE_BYTES))


def kill_in_every_phase(store: SlotStore) -> None:
    """Fork a writer for each phase of a write. Each writer is killed in its phase."""
    for at, phase in enumerate(PHASES):
        child = os.fork()
        if child == 0:
            asyncio.run(write_and_die(store, phase, FIRST_KILLED + at))
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the writer that was to be killed {phase} was not"


def main() -> None:
    root, index = map(Path, sys.argv[1:])
    kill_in_every_phase(store_at(root, index))


if __name__ == "__main__":
    main()
