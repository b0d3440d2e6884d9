"""How near the file store comes to its limit: the same bytes by bare system calls, in the same run.

The limit of reading is `preadv` of pages out of one large file, and of writing `pwrite` into a fresh
one: no names, no checksums, no files to open. Both are measured with one thread and with as many as
the store uses, on the same directory and the same memory, in turns with the store, and the best of
the rounds counts.
"""

import argparse
import asyncio
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from ..storage_backends.base import ObjectName, Read, ReadOutcome, Write, WriteOutcome
from ..storage_backends.file import FileBackend

ROUNDS = 5
BATCH_PAGES = 32
"""Pages of one call."""
CALLS = 2
"""Calls in flight, as an engine with several prefetches has them."""
THREADS = 2
_DEADLINE_S = 300.0


def run(page_bytes: int, pages: int, directory: Path, threads: int = THREADS) -> dict[str, float]:
    """Measure in `directory`, which is left empty, and return GB/s, ratios and existence times.

    Keys: `read`, `write`, and of the bare calls `raw_read_1`, `raw_read`, `raw_write_1`, `raw_write`
    (with one thread, and with `threads`), all in GB/s; `read_ratio` and `write_ratio` of the store
    over the better of its two limits; `exists_seen_us` and `exists_unseen_us` for 1,000 keys.
    """
    work = Path(tempfile.mkdtemp(prefix="lockstep-bench-", dir=directory))
    try:
        return _run(page_bytes, pages, work, threads)
    finally:
        shutil.rmtree(work)


def _run(page_bytes: int, pages: int, work: Path, threads: int) -> dict[str, float]:
    source = _memory(page_bytes, pages)
    target = _memory(page_bytes, pages)
    for page in range(pages):
        source[page][:8] = page.to_bytes(8, "little")
    best: dict[str, float] = {}
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            _raw_round(pool, threads, work / "raw", source, target, best=best)
            asyncio.run(_store_round(work / "store", threads, source, target, best))
            shutil.rmtree(work / "store")
    best["read_ratio"] = best["read"] / max(best["raw_read_1"], best["raw_read"])
    best["write_ratio"] = best["write"] / max(best["raw_write_1"], best["raw_write"])
    return best


def _raw_round(
    pool: ThreadPoolExecutor,
    threads: int,
    path: Path,
    source: list[memoryview],
    target: list[memoryview],
    *,
    best: dict[str, float],
) -> None:
    total = sum(page.nbytes for page in source)
    for name, count in (("raw_write_1", 1), ("raw_write", threads)):
        path.unlink(missing_ok=True)
        begun = time.perf_counter()
        _write_raw(pool, count, path, source)
        _keep(best, name, total, time.perf_counter() - begun)
    for name, count in (("raw_read_1", 1), ("raw_read", threads)):
        begun = time.perf_counter()
        _read_raw(pool, count, path, target)
        _keep(best, name, total, time.perf_counter() - begun)
    path.unlink()


async def _store_round(
    root: Path,
    threads: int,
    source: list[memoryview],
    target: list[memoryview],
    best: dict[str, float],
) -> None:
    names = [
        ObjectName("ab" * 32, f"{page:064x}", "kv", "l0-1.h0-8") for page in range(len(source))
    ]
    total = sum(page.nbytes for page in source)
    writer = FileBackend(root, threads=threads)
    await writer.open()
    begun = time.perf_counter()
    await asyncio.gather(*(_write_store(writer, names, source, one) for one in range(CALLS)))
    _keep(best, "write", total, time.perf_counter() - begun)
    await writer.close()

    # A second backend, which has not seen the names.
    reader = FileBackend(root, threads=threads)
    await reader.open()
    asked = (names * (1000 // len(names) + 1))[:1000]
    for key in ("exists_unseen_us", "exists_seen_us"):
        begun = time.perf_counter()
        found = await reader.exists(asked, deadline=time.monotonic() + _DEADLINE_S)
        spent_us = (time.perf_counter() - begun) * 1e6
        best[key] = min(best.get(key, spent_us), spent_us)
        if not all(found):
            raise RuntimeError("a page that was written does not exist")
    # Twice, because the bare calls read their file twice as well.
    for _ in range(2):
        begun = time.perf_counter()
        await asyncio.gather(*(_read_store(reader, names, target, one) for one in range(CALLS)))
        _keep(best, "read", total, time.perf_counter() - begun)
    await reader.close()


async def _write_store(
    store: FileBackend, names: list[ObjectName], pages: list[memoryview], one: int
) -> None:
    """Write every `CALLS`-th batch, from the one numbered `one`."""
    for start in range(one * BATCH_PAGES, len(names), CALLS * BATCH_PAGES):
        part = slice(start, start + BATCH_PAGES)
        writes = [Write(*each) for each in zip(names[part], pages[part], strict=True)]
        outcomes = await store.write(writes, deadline=time.monotonic() + _DEADLINE_S)
        if set(outcomes) != {WriteOutcome.OK}:
            raise RuntimeError(f"a write failed: {outcomes}")


async def _read_store(
    store: FileBackend, names: list[ObjectName], pages: list[memoryview], one: int
) -> None:
    """Read every `CALLS`-th batch, from the one numbered `one`."""
    for start in range(one * BATCH_PAGES, len(names), CALLS * BATCH_PAGES):
        part = slice(start, start + BATCH_PAGES)
        reads = [Read(*each) for each in zip(names[part], pages[part], strict=True)]
        outcomes = await store.read(reads, deadline=time.monotonic() + _DEADLINE_S)
        if set(outcomes) != {ReadOutcome.OK}:
            raise RuntimeError(f"a read failed: {outcomes}")


def _write_raw(pool: ThreadPoolExecutor, threads: int, path: Path, pages: list[memoryview]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _each(pool, threads, len(pages), lambda page: os.pwrite(fd, pages[page], _at(pages, page)))
    finally:
        os.close(fd)


def _read_raw(pool: ThreadPoolExecutor, threads: int, path: Path, pages: list[memoryview]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        _each(
            pool, threads, len(pages), lambda page: os.preadv(fd, [pages[page]], _at(pages, page))
        )
    finally:
        os.close(fd)


def _at(pages: list[memoryview], page: int) -> int:
    return page * pages[0].nbytes


def _each(
    pool: ThreadPoolExecutor, threads: int, pages: int, work: Callable[[int], object]
) -> None:
    """Do `work` for every page: neighbouring pages in one thread, like the store's jobs."""

    def some(first: int, last: int) -> None:
        for page in range(first, last):
            work(page)

    if threads == 1:
        some(0, pages)
        return
    cuts = [pages * part // threads for part in range(threads + 1)]
    for done in [pool.submit(some, *ends) for ends in pairwise(cuts)]:
        done.result()


def _memory(page_bytes: int, pages: int) -> list[memoryview]:
    """Return page buffers side by side in memory that is faulted in already, as a pool is."""
    memory = mmap.mmap(-1, page_bytes * pages)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for at in range(0, len(memory), mmap.PAGESIZE):
        view[at] = 1
    return [view[page * page_bytes : (page + 1) * page_bytes] for page in range(pages)]


def _keep(best: dict[str, float], name: str, nbytes: int, seconds: float) -> None:
    best[name] = max(best.get(name, 0.0), nbytes / seconds / 1e9)


def main() -> None:
    """Print a table for several page sizes."""
    parser = argparse.ArgumentParser(description="Measure file:// against bare system calls.")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--total-mib", type=int, default=256, help="bytes moved at each size")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    print(
        "page KiB |  read  raw raw/1 ratio | write  raw raw/1 ratio | exists/1000 us seen, unseen"
    )
    for page_kib in options.page_kib:
        pages = max(1, options.total_mib * 1024 // page_kib)
        got = run(page_kib << 10, pages, options.directory, options.threads)
        print(
            f"{page_kib:8} | {got['read']:5.2f} {got['raw_read']:5.2f} {got['raw_read_1']:5.2f} "
            f"{got['read_ratio']:5.2f} | {got['write']:5.2f} {got['raw_write']:5.2f} "
            f"{got['raw_write_1']:5.2f} {got['write_ratio']:5.2f} | "
            f"{got['exists_seen_us']:5.0f} {got['exists_unseen_us']:5.0f}"
        )


if __name__ == "__main__":
    main()
