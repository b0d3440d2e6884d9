"""Upper bound of a store's throughput: system calls that move the same number of bytes.

The calls need no object names and no checksums. Reads are `preadv` from one large file that is already
open. Writes are `pwrite` to a new file.
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
"""Page buffers of equal length."""

_SAME_BYTES: Final = 1 << 20


class BareCalls:
    """Reads and writes one temporary file in `directory` with `threads` threads.

    Each thread handles consecutive pages, as a store's threads do.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self._directory = directory
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._file: IO[bytes] | None = None

    def write(self, pages: Pages) -> None:
        """Write the pages to a new temporary file, which replaces the previous one."""
        self.forget()
        page_bytes = pages[0].nbytes
        file = self._file = tempfile.TemporaryFile(  # noqa: SIM115 - `forget` closes it.
            dir=self._directory, buffering=0
        )
        fd = file.fileno()
        self._each(len(pages), lambda page: os.pwrite(fd, pages[page], page * page_bytes))

    def read(self, pages: Pages) -> None:
        """Fill the pages from the temporary file that was written last."""
        assert self._file is not None
        fd, page_bytes = self._file.fileno(), pages[0].nbytes
        self._each(len(pages), lambda page: os.preadv(fd, [pages[page]], page * page_bytes))

    def forget(self) -> None:
        """Delete the temporary file."""
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
    """Return adjacent page buffers filled with repeating random bytes.

    Like a host pool's memory, the memory is already faulted in.
    """
    view, noise = untouched_memory(page_bytes * count), os.urandom(_SAME_BYTES)
    for at in range(0, len(view), _SAME_BYTES):
        view[at : at + _SAME_BYTES] = noise[: len(view) - at]
    return [view[page * page_bytes : (page + 1) * page_bytes] for page in range(count)]


def require_memory_twice(nbytes: int) -> None:
    """Raise `ConfigError` unless the machine has memory for `nbytes` of pages and a copy of them."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * nbytes > there:
        raise ConfigError(
            f"--bytes is {nbytes}, which needs twice as much memory, but there are {there} bytes of it;"
            " give less"
        )


def untouched_memory(nbytes: int) -> memoryview:
    """Return memory of the same kind as a host pool's: private, with huge pages if the kernel has them.

    The memory is untouched: the kernel clears each memory page only when it is first accessed.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
