"""Upper bound of the storage path's throughput: read and hash a store's files by bare system calls.

Each thread takes consecutive pages. For each page it opens the file, reads header and page with one
`preadv`, and hashes the page while it is in the CPU cache. No object name is computed and no checksum
is compared.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ...page_format.object_header import HEADER_BYTES, Statement, read_statement
from ..bare_calls import untouched_memory

_DEVICE_THREADS: Final = 16
"""The number of concurrent reads that measure the storage device alone; enough to saturate most
devices."""


class StoredPage(NamedTuple):
    """The file that contains a KV page, and the offset of the page's header in the file."""

    file: str
    offset: int


class BareFiles:
    """Reads and writes KV pages of `page_bytes` bytes on `threads` threads."""

    def __init__(
        self, page_bytes: int, threads: int, *, direct: bool = False, hashes: bool = True
    ) -> None:
        self._hashes = hashes
        self._page_bytes = page_bytes
        self._threads = threads
        self._direct = os.O_DIRECT if direct else 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bare")
        # Start the threads here, so that their start is not timed.
        self._divide(threads, lambda _first, _last: None)

    def read(self, pages: Sequence[StoredPage], memory: memoryview) -> None:
        """Read pages back to back into `memory`, and hash each one unless hashing is disabled."""
        nbytes = self._page_bytes

        def some(first: int, last: int) -> None:
            header = memoryview(mmap.mmap(-1, HEADER_BYTES))
            for number in range(first, last):
                file, offset = pages[number]
                page = memory[number * nbytes : (number + 1) * nbytes]
                fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | self._direct)
                try:
                    os.preadv(fd, [header, page], offset)
                finally:
                    os.close(fd)
                if self._hashes:
                    xxhash.xxh3_128_digest(page)

        self._divide(len(pages), some)

    def write(self, directory: Path, names: Sequence[str], memory: memoryview) -> None:
        """Write each KV page of `memory` to a new file, and hash it."""
        nbytes, header = self._page_bytes, memoryview(mmap.mmap(-1, HEADER_BYTES))

        def some(first: int, last: int) -> None:
            for number in range(first, last):
                page = memory[number * nbytes : (number + 1) * nbytes]
                xxhash.xxh3_128_digest(page)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct
                fd = os.open(directory / names[number], flags, 0o600)
                try:
                    os.pwritev(fd, [header, page], 0)
                finally:
                    os.close(fd)

        self._divide(len(names), some)

    def close(self) -> None:
        self._pool.shutdown()

    def _divide(self, count: int, work: Callable[[int, int], None]) -> None:
        cuts = [count * part // self._threads for part in range(self._threads + 1)]
        for done in [self._pool.submit(work, *ends) for ends in pairwise(cuts)]:
            done.result()


def pages_of_files(directory: Path, page_bytes: int) -> list[StoredPage]:
    """Return the stored pages in a directory with one file per page; other files are ignored."""
    files = [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.stat().st_size == HEADER_BYTES + page_bytes
    ]
    return [StoredPage(str(file), 0) for file in files]


def pages_of_slots(directory: Path, slot_bytes: int, namespace: str) -> list[StoredPage]:
    """Return the pages that a 3fs:// store has for a namespace; the store keeps them in slot files."""
    pages: list[StoredPage] = []
    for file in sorted(directory.glob("slots-*")):
        with file.open("rb", buffering=0) as slots:
            for offset in range(0, file.stat().st_size, slot_bytes):
                slots.seek(offset)
                statement = read_statement(memoryview(slots.read(HEADER_BYTES)))
                if isinstance(statement, Statement) and statement.name.namespace == namespace:
                    pages.append(StoredPage(str(file), offset))
    return pages


def is_in_memory(directory: Path) -> bool:
    """Return whether a directory, which may not exist yet, is on an in-memory filesystem."""
    there = next(each for each in (directory, *directory.parents) if each.exists())
    device = there.stat().st_dev
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    mounted = {line.split()[2]: line.partition(" - ")[2].split()[0] for line in lines}
    kind = mounted.get(f"{os.major(device)}:{os.minor(device)}")
    return kind in ("tmpfs", "ramfs")


def forget(pages: Sequence[StoredPage]) -> None:
    """Flush the files of these pages to disk, and ask the kernel to drop them from its page cache."""
    for file in dict.fromkeys(page.file for page in pages):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fresh_memory(nbytes: int, *, touched: bool) -> memoryview:
    """Return memory of the same kind as a host pool's; if `touched`, fill it with zeros."""
    view = untouched_memory(nbytes)
    if touched:
        zeros = bytes(1 << 20)
        for at in range(0, nbytes, len(zeros)):
            view[at : at + len(zeros)] = zeros[: nbytes - at]
    return view


def read_device(pages: Sequence[StoredPage], page_bytes: int) -> None:
    """Read pages as fast as the device can: concurrently, past the page cache, without hashing."""
    bare = BareFiles(page_bytes, _DEVICE_THREADS, direct=True, hashes=False)
    try:
        bare.read(pages, fresh_memory(page_bytes * len(pages), touched=True))
    finally:
        bare.close()
