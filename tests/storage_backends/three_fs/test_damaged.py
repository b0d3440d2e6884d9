"""`3fs://` over damaged indexes, failing disks and small filesystems."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.storage_backends import threaded_backend
from lockstep.storage_backends.base import WriteOutcome
from lockstep.storage_backends.three_fs import files as three_fs_files
from lockstep.storage_backends.three_fs.backend import ThreeFsBackend
from tests.kit.storage.calls import (
    get,
    listed,
    object_name,
    opened,
    page,
    put,
    put_many,
    soon,
    wrongly_served,
)
from tests.kit.storage.files import failing
from tests.kit.storage.three_fs import alter, over_usrbio, small_store
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
    alter(tmp_path / "index.db", harm)
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
        await put_many(backend, range(5))
    alter(tmp_path / "index.db", harm)

    async with opened(store) as backend:
        read = [await get(backend, object_name(number)) for number in range(5)]
        assert wrongly_served(range(5), read) == []
        outcomes = await put_many(backend, range(3, 12))
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

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", failing())
            with pytest.raises(StorageError, match="could not be listed") as caught:
                await listed(backend)
            assert "\n" not in str(caught.value)
    async with opened(store) as backend:
        assert len(await listed(backend)) == 1
    async with opened(store) as backend:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fstat", failing())
            with pytest.raises(StorageError, match="could not be listed"):
                await listed(backend)
        (store.root / "slots-000000").unlink()
        # Objects whose slot file was removed are no longer listed.
        assert await listed(backend) == []


async def test_a_listing_that_a_ring_does_not_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = UsrbioStandIn()
    store = small_store(tmp_path, make_transfers=over_usrbio(stand_in))
    monkeypatch.setattr(threaded_backend, "_LIST_TIMEOUT_S", 0.2)

    async with opened(store) as backend:
        await put(backend, object_name(1), page(1))
        stand_in.gate.clear()
        with pytest.raises(StorageError, match="could not be listed"):
            await listed(backend)
        stand_in.gate.set()


@pytest.mark.parametrize(("module", "fails"), [(three_fs_files, "allocate"), (os, "pwritev")])
async def test_a_filesystem_that_is_too_small_is_said_once_with_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: ModuleType,
    fails: str,
) -> None:
    monkeypatch.setattr(module, fails, failing(errno.ENOSPC))

    async with opened(small_store(tmp_path)) as backend:
        written = [await put_many(backend, range(8)) for _ in range(2)]

    assert written == [[WriteOutcome.FAILED] * 8] * 2
    (warning,) = [each for each in caplog.messages if "No space left" in each]
    assert "files=" in warning
