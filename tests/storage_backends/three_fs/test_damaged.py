"""`3fs://` over damaged indexes, ill disks and small filesystems, and with buffers that do not fit."""

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, Write, WriteOutcome
from lockstep.storage_backends.three_fs import backend as three_fs
from lockstep.storage_backends.three_fs import files as three_fs_files
from lockstep.storage_backends.three_fs.backend import ThreeFsBackend
from lockstep.storage_backends.three_fs.usrbio_rings import UsrbioRings
from tests.kit.storage.calls import (
    get,
    listed,
    object_name,
    opened,
    page,
    put,
    reading,
    soon,
    writing,
)
from tests.kit.storage.three_fs import SLOT_BYTES, small_store
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE settings SET value = 'x' WHERE name = 'slot_bytes'",
        "UPDATE settings SET value = 0 WHERE name = 'slot_bytes'",
        "UPDATE settings SET value = -4096 WHERE name = 'slot_bytes'",
        "UPDATE settings SET value = 12345 WHERE name = 'slot_bytes'",
        "UPDATE settings SET value = 1 << 40 WHERE name = 'file_slots'",
        "UPDATE settings SET value = NULL WHERE name = 'slots'",
        "DROP TABLE entries; CREATE VIEW entries AS SELECT 1",
    ],
)
async def test_an_index_with_settings_that_no_store_has_is_refused_in_one_line(
    tmp_path: Path, harm: str
) -> None:
    store = small_store(tmp_path)

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
    with sqlite3.connect(tmp_path / "index.db") as database:
        database.executescript(harm)
    database.close()
    backend = ThreeFsBackend(store.root, store.make_index())
    with pytest.raises(ConfigError) as caught:
        await backend.open()
    assert "\n" not in str(caught.value)
    await backend.close()


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE settings SET value = 'y' WHERE name = 'generation'",
        "UPDATE settings SET value = 'y' WHERE name = 'fresh'",
        "UPDATE settings SET value = 9223372036854775807 WHERE name = 'generation'",
        "UPDATE entries SET slot = -5",
        "UPDATE entries SET slot = 9000000000000",
        "UPDATE entries SET offset = 1125899906842624 - 4096",
        "UPDATE entries SET used = 'zz'",
        "INSERT INTO slots VALUES (-3, 5, 0)",
    ],
)
async def test_a_damaged_index_costs_keys_and_never_raises(tmp_path: Path, harm: str) -> None:
    store = small_store(tmp_path)

    async with opened(store) as backend:
        for number in range(5):
            await put(backend, object_name(number), page(number))
    with sqlite3.connect(tmp_path / "index.db") as database:
        database.execute(harm)
    database.close()
    async with opened(store) as backend:
        for number in range(5):
            outcome, content = await get(backend, object_name(number))
            assert outcome is not ReadOutcome.OK or content == page(number)
        writes = [writing(object_name(number), page(number)) for number in range(3, 12)]
        outcomes = await backend.write(writes, deadline=soon())
        assert (WriteOutcome.FAILED in outcomes) == ("settings" in harm)
        assert await backend.exists([object_name(77)], deadline=soon()) == [False]
        assert len(await backend.remove([object_name(1)], deadline=soon())) == 1
        with suppress(StorageError):
            await listed(backend)
    files = sorted(each.name for each in store.root.iterdir())
    assert files in (["slots-000000", "store"], ["slots-000000", "slots-000001", "store"])


async def test_a_listing_that_cannot_read_a_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_store(tmp_path)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, "the disk is ill")

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", refuse)
            with pytest.raises(StorageError, match="could not be listed") as caught:
                await listed(backend)
            assert "\n" not in str(caught.value)
    async with opened(store) as backend:
        assert len(await listed(backend)) == 1
    async with opened(store) as backend:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fstat", refuse)
            with pytest.raises(StorageError, match="could not be listed"):
                await listed(backend)
        (store.root / "slots-000000").unlink()
        # What is gone is not in the store.
        assert await listed(backend) == []


async def test_a_listing_that_a_ring_does_not_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = UsrbioStandIn()
    store = small_store(tmp_path, make_rings=lambda: UsrbioRings(stand_in, "/mnt/3fs"))
    monkeypatch.setattr(three_fs, "_LIST_TIMEOUT_S", 0.2)

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        stand_in.gate.clear()
        with pytest.raises(StorageError, match="could not be listed"):
            await listed(backend)
        stand_in.gate.set()


def unfit(kind: str, nbytes: int) -> tuple[memoryview, ...]:
    match kind:
        case "longer":
            return (memoryview(bytearray(nbytes + 1)),)
        case "shorter":
            return (memoryview(bytearray(nbytes // 2)), memoryview(bytearray(nbytes // 2 - 1)))
        case "far longer":
            return (memoryview(bytearray(SLOT_BYTES)),)
        case _:
            return (memoryview(bytearray(2 * nbytes))[::2],)


@pytest.mark.parametrize("kind", ["longer", "shorter", "far longer", "not contiguous"])
async def test_buffers_that_do_not_fit_cost_their_key_alone(tmp_path: Path, kind: str) -> None:
    store = small_store(tmp_path)
    nbytes = 16 << 10
    shape = ObjectShape.whole(nbytes)

    async with opened(store) as backend:
        await put(backend, object_name(0), page(0))
        bad = Write(object_name(1), unfit(kind, nbytes), shape)
        good = [writing(object_name(number), page(number)) for number in (2, 3)]
        wrote = await backend.write([good[0], bad, good[1]], deadline=soon())
        assert wrote == [WriteOutcome.OK, WriteOutcome.FAILED, WriteOutcome.OK]
        unread = Read(object_name(0), unfit(kind, nbytes), shape)
        constant = Read(object_name(0), (memoryview(bytes(nbytes)),), shape)
        buffers = [bytearray(nbytes) for _ in range(2)]
        reads = [reading(object_name(number + 2), each) for number, each in enumerate(buffers)]
        outcomes = await backend.read([reads[0], unread, constant, reads[1]], deadline=soon())
        failed = ReadOutcome.FAILED
        assert outcomes == [ReadOutcome.OK, failed, failed, ReadOutcome.OK]
        assert buffers == [page(2), page(3)]
        assert await get(backend, object_name(0)) == (ReadOutcome.OK, page(0))


@pytest.mark.parametrize("fails", ["allocate", "pwritev"])
async def test_a_filesystem_that_is_too_small_is_said_once_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    store = small_store(tmp_path)

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((three_fs_files, fails) if fails == "allocate" else (os, fails)), refuse)

    async with opened(store) as backend:
        writes = [writing(object_name(number), page(number)) for number in range(8)]
        for _ in range(2):
            outcomes = await backend.write(writes, deadline=soon())
            assert set(outcomes) == {WriteOutcome.FAILED}
    (said,) = [each for each in caplog.messages if "No space left" in each]
    assert "files=" in said
