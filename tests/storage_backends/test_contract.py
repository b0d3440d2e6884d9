"""Every storage backend keeps the same contract."""

from pathlib import Path

import pytest

from lockstep.storage_backends.file.objects import Durability
from tests.kit.storage.calls import StoreUnderTest
from tests.kit.storage.contract import StorageContract
from tests.kit.storage.files import FileStore, forbid_unnamed_files
from tests.kit.storage.memory import MemoryStore


@pytest.fixture(params=["memory", "file", "file-data", "file-full", "file-direct", "file-named"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StoreUnderTest:
    root = tmp_path / "store"
    match request.param:
        case "memory":
            return MemoryStore()
        case "file-data":
            return FileStore(root, Durability.DATA)
        case "file-full":
            return FileStore(root, Durability.FULL)
        case "file-direct":
            return FileStore(root, direct=True)
        case "file-named":
            forbid_unnamed_files(monkeypatch)
            return FileStore(root)
        case _:
            return FileStore(root)


class TestStorageContract(StorageContract):
    """The storage contract, over every backend."""
