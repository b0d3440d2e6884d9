"""Promises of `file://` beyond the contract: bad files, bad directories, and slow kernels."""

import asyncio
import errno
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, UsageError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.file.contents import BLOCK_BYTES
from lockstep.storage_backends.file.quarantine import PLACES
from tests.kit.storage.calls import (
    KIB,
    get,
    listed,
    object_name,
    opened,
    page,
    put,
    put_many,
    reading,
    run,
    soon,
    turns,
    using,
    writing,
)
from tests.kit.storage.files import (
    FileStore,
    Gate,
    failing,
    flipped,
    move_few_bytes_at_a_time,
    open_refusing,
)

SIZE = 16 * KIB


def replace_by_zeros(path: Path) -> None:
    path.write_bytes(bytes(BLOCK_BYTES + SIZE))


def cut(nbytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, nbytes)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": cut(0),
    "cut within the header": cut(50),
    "cut within the first block": cut(BLOCK_BYTES - 1),
    "no payload": cut(BLOCK_BYTES),
    "one byte short": cut(BLOCK_BYTES + SIZE - 1),
    "one block short": cut(BLOCK_BYTES + SIZE - 4096),
    "one byte long": cut(BLOCK_BYTES + SIZE + 1),
    "megabytes long": cut(64 << 20),
    "zeros": replace_by_zeros,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("direct", [False, True], ids=["", "direct"])
async def test_what_is_not_the_object_is_corrupt_once_and_then_gone(
    tmp_path: Path, damage: Callable[[Path], None], direct: bool
) -> None:
    store = FileStore(tmp_path / "store", direct=direct)

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        damage(store.path(object_name(1)))
        buffer = memoryview(mmap.mmap(-1, SIZE))
        reads = [reading(object_name(1), buffer)]
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.CORRUPT]
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.MISSING]
        assert len(store.quarantined()) == 1
        assert await put(backend, object_name(1), page(2)) is WriteOutcome.OK
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK]
        assert buffer == page(2)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_write_is_lost_only_to_a_file_of_the_same_size(
    store: FileStore, damage: Callable[[Path], None]
) -> None:
    same_size = damage is replace_by_zeros
    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        damage(store.path(object_name(1)))
        wrote = await put(backend, object_name(1), page(2))
        assert wrote is (WriteOutcome.PRESENT if same_size else WriteOutcome.OK)
        read = await get(backend, object_name(1))
        assert read[0] is (ReadOutcome.CORRUPT if same_size else ReadOutcome.OK)


def some_of(bits: int) -> list[int]:
    draw = random.Random(20)
    return [draw.randrange(bits) for _ in range(100)]


@pytest.mark.parametrize(
    ("size", "bits"),
    [
        (9000, [*range(8 * 96), *some_of(8 * HEADER_BYTES)]),
        (600 * KIB, some_of(8 * (BLOCK_BYTES + 600 * KIB))),
    ],
    ids=["header", "anywhere"],
)
async def test_a_flipped_bit_anywhere_in_the_file_is_found(
    store: FileStore, size: int, bits: list[int]
) -> None:
    async with opened(store) as backend:
        await put(backend, object_name(1), page(1, size))
        path = store.path(object_name(1))
        good = path.read_bytes()
        outcomes: dict[int, ReadOutcome] = {}
        for bit in bits:
            path.write_bytes(flipped(good, bit))
            outcomes[bit], _ = await get(backend, object_name(1), size)
        assert outcomes == dict.fromkeys(bits, ReadOutcome.CORRUPT)
        assert len(store.quarantined()) == PLACES


async def test_what_is_no_object_is_not_listed(store: FileStore) -> None:
    async with opened(store) as backend:
        await put_many(backend, range(4))
        replace_by_zeros(store.path(object_name(1)))
        cut(BLOCK_BYTES - 1)(store.path(object_name(2)))
        store.path(object_name(3)).rename(store.path(object_name(3)).with_name("elsewhere"))
        (store.root / "objects" / "file").write_bytes(b"x")
        (store.root / "objects" / "link").symlink_to(store.root / "objects")
        names = {each.name for each in await listed(backend)}
        # A sound object that was moved to another path is not listed, because no reader looks for it
        # there.
        assert names == {object_name(0)}


async def test_an_error_of_the_device_is_failed_for_the_key_and_takes_nothing_away(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing())
            patch.setattr(os, "pwritev", failing())
            assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
            assert await put(backend, object_name(2), page(2)) is WriteOutcome.FAILED
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))
        assert (await get(backend, object_name(2)))[0] is ReadOutcome.MISSING
        assert store.quarantined() == []


@pytest.mark.parametrize("nbytes", [1, 5000, 300 * KIB])
async def test_calls_that_move_only_a_few_bytes_are_continued(
    store: FileStore, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_few_bytes_at_a_time(monkeypatch, seed=nbytes)

    async with opened(store) as backend:
        assert await put(backend, object_name(1), page(1, nbytes)) is WriteOutcome.OK
        assert await get(backend, object_name(1), nbytes) == (ReadOutcome.OK, page(1, nbytes))


@pytest.mark.parametrize("nbytes", [4 * KIB, 64 * KIB, 1 << 20])
async def test_direct_io_goes_around_the_page_cache_with_aligned_buffers(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "store", direct=True)
    flags: list[int] = []
    real_open = os.open

    def watched(path: Any, flag: int, *args: Any, **named: Any) -> int:
        flags.append(flag)
        return real_open(path, flag, *args, **named)

    async with opened(store) as backend:
        aligned = memoryview(mmap.mmap(-1, nbytes))
        aligned[:] = page(1, nbytes)
        monkeypatch.setattr(os, "open", watched)
        writes = [writing(object_name(1), aligned)]
        assert await backend.write(writes, deadline=soon()) == [WriteOutcome.OK]
        aligned[:] = bytes(nbytes)
        reads = [reading(object_name(1), aligned)]
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK]
        assert aligned == page(1, nbytes)
        assert [bool(flag & os.O_DIRECT) for flag in flags if not flag & os.O_PATH][-1]
        # An unaligned buffer, which direct I/O cannot use, is filled by an ordinary read.
        unaligned = memoryview(mmap.mmap(-1, nbytes + 1))[1:]
        reads = [reading(object_name(1), unaligned)]
        assert await backend.read(reads, deadline=soon()) == [ReadOutcome.OK]
        assert unaligned == page(1, nbytes)
        assert not flags[-1] & os.O_DIRECT


def test_direct_io_is_refused_by_name_where_the_filesystem_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_direct_io = open_refusing(lambda _, flags: bool(flags & os.O_DIRECT), errno.EINVAL)
    monkeypatch.setattr(os, "open", no_direct_io)
    with pytest.raises(ConfigError, match="direct=1 needs a filesystem with O_DIRECT"):
        run(FileStore(tmp_path / "store", direct=True).backend().open())


@pytest.mark.parametrize("below", ["", "deeper", "objects"])
def test_a_directory_that_cannot_be_used_is_refused_at_open(tmp_path: Path, below: str) -> None:
    in_the_way = tmp_path / "store" / below
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_bytes(b"")
    root = tmp_path / "store" / ("deeper" if below == "deeper" else "")
    with pytest.raises(ConfigError, match=f"store directory {root} cannot be used"):
        run(FileStore(root).backend().open())


def test_a_directory_without_room_for_a_file_is_refused_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EROFS))
    with pytest.raises(
        ConfigError, match="Read-only file system; mount its filesystem for writing"
    ):
        run(FileStore(tmp_path / "store").backend().open())


async def test_a_store_is_opened_before_use_and_once(store: FileStore) -> None:
    backend = store.backend()
    with pytest.raises(UsageError, match="is not open"):
        await backend.exists([object_name(1)], deadline=soon())
    async with using(backend):
        with pytest.raises(UsageError, match="opened before"):
            await backend.open()


async def test_s3_a_cancelled_read_returns_only_when_its_thread_has_left_the_buffer(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store) as backend:
        await put_many(backend, range(2))
        gate = Gate(monkeypatch)
        buffers = [bytearray(SIZE), bytearray(SIZE)]
        reads = [reading(object_name(n), buffers[n]) for n in range(2)]
        call = asyncio.create_task(backend.read(reads, deadline=soon()))
        await gate.entered()
        waits: list[bool] = []
        for _ in range(3):
            call.cancel()
            await turns()
            waits.append(not call.done())
        assert waits == [True] * 3
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert buffers[1] == bytearray(SIZE)
        mark = bytearray([0xEE]) * SIZE
        buffers[0][:] = mark
        await backend.close()
        assert buffers == [mark, bytearray(SIZE)]


async def test_s2_what_has_not_begun_at_the_deadline_never_begins(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_time = time.monotonic

    async with opened(store) as backend:
        await put_many(backend, range(2), 1 << 20)
        gate = Gate(monkeypatch)
        buffers = [bytearray(1 << 20), bytearray(1 << 20)]
        reads = [reading(object_name(n), buffers[n]) for n in range(2)]
        call = asyncio.create_task(backend.read(reads, deadline=soon()))
        await gate.entered()
        monkeypatch.setattr(time, "monotonic", lambda: real_time() + 1000)
        await turns()
        assert not call.done()
        gate.open()
        assert await call == [ReadOutcome.TIMED_OUT] * 2
        assert buffers[1] == bytearray(1 << 20)


async def test_names_that_were_seen_are_answered_without_asking_the_kernel(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [object_name(number) for number in range(50)]

    def never(*_: object, **__: object) -> bool:
        raise AssertionError("the kernel was asked")

    async with opened(store) as writer, opened(store) as other:
        await put_many(writer, range(50))
        assert all(await other.exists(names, deadline=soon()))
        monkeypatch.setattr(os, "access", never)
        assert await writer.exists(names, deadline=soon()) == [True] * 50
        assert await other.exists(names, deadline=soon()) == [True] * 50
