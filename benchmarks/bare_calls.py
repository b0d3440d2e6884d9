"""The limit of a store: the same bytes by bare system calls, without names, checksums or opens.

Reading is `preadv` of pages out of one large file, and writing is `pwrite` of pages into a fresh one.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Final

from ..errors import ConfigError

Pages = Sequence[memoryview]
"""Buffers of one length."""

_SAME_BYTES: Final = 1 << 20


class BareCalls:
    """Reads and writes one file in `directory`, with `threads` threads; nothing is left of it.

    Each thread has neighbouring pages, as the jobs of a store have.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._directory = directory
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._file: IO[bytes] | None = None

    def write(self, pages: Pages) -> None:
        """Write the pages into a fresh file, in place of the one before."""
        self.forget()
        page_bytes = pages[0].nbytes
        file = self._file = tempfile.TemporaryFile(  # noqa: SIM115 - `forget` closes it.
            dir=self._directory, buffering=0
        )
        fd = file.fileno()
        self._each(len(pages), lambda page: os.pwrite(fd, pages[page], page * page_bytes))

    def read(self, pages: Pages) -> None:
        """Read what was written last into the pages."""
        assert self._file is not None
        fd, page_bytes = self._file.fileno(), pages[0].nbytes
        self._each(len(pages), lambda page: os.preadv(fd, [pages[page]], page * page_bytes))

    def forget(self) -> None:
        """Give the file's room back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        self.forget()
        self._pool.shutdown()

    def _each(self, pages: int, work: Callable[[int], object]) -> None:
        def some(first: int, last: int) -> None:
            for page in range(first, last):
                work(page)

        if self._threads == 1:
            some(0, pages)
            return
        cuts = [pages * part // self._threads for part in range(self._threads + 1)]
        for done in [self._pool.submit(some, *ends) for ends in pairwise(cuts)]:
            done.result()


def pages_in_memory(page_bytes: int, count: int) -> list[memoryview]:
    """Return page buffers side by side in memory that is faulted in already, as a host pool is.

    They hold random bytes, which repeat.
    """
    view, noise = untouched_memory(page_bytes * count), os.urandom(_SAME_BYTES)
    for at in range(0, len(view), _SAME_BYTES):
        view[at : at + _SAME_BYTES] = noise[: len(view) - at]
    return [view[page * page_bytes : (page + 1) * page_bytes] for page in range(count)]


def require_memory_twice(nbytes: int) -> None:
    """Raise `ConfigError` if the machine has no room for the pages and those read back."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * nbytes > there:
        raise ConfigError(
            f"--bytes is {nbytes}, which are in memory twice, and there are {there} bytes of it; give"
            " less"
        )


def untouched_memory(nbytes: int) -> memoryview:
    """Return memory as a host pool has it: private, in large pages where the kernel has them.

    Until it is touched the kernel has cleared none of it.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
