"""Every backend keeps the same promises."""

from pathlib import Path

import pytest
from storage_contract import StorageContract, StoreUnderTest
from storage_files import FileStore, forbid_unnamed_files

from lockstep.storage_backends.base import ObjectName
from lockstep.storage_backends.file_objects import Durability
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.page_object import name_digest


class MemoryStore:
    def __init__(self) -> None:
        self.shelf = Shelf()

    def backend(self) -> MemoryBackend:
        return MemoryBackend(self.shelf)

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        header, payload = self.shelf.objects[digest_of(name)]
        spoilt = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        self.shelf.objects[digest_of(name)] = (header, spoilt)

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.shelf.objects[digest_of(other)] = self.shelf.objects[digest_of(name)]


def digest_of(name: ObjectName) -> bytes:
    digest = name_digest(name)
    assert digest is not None
    return digest


@pytest.fixture(
    params=[
        "memory",
        "file",
        "file-data",
        "file-full",
        "file-direct",
        "file-named",
        "file-named-full",
    ]
)
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
        case "file-named-full":
            forbid_unnamed_files(monkeypatch)
            return FileStore(root, Durability.FULL)
        case _:
            return FileStore(root)


class TestStorageContract(StorageContract):
    """The suite, over every backend."""
