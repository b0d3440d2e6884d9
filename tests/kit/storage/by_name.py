"""Every kind of store under test, by its name, so that one suite can run over all of them.

What a store is made from (a server, a bucket) is a fixture of the test's folder, and is only started
for a test that needs it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.storage_backends.three_fs.rings import RingClient
from tests.kit.storage.calls import StoreUnderTest
from tests.kit.storage.files import FileStore
from tests.kit.storage.memory import MemoryStore
from tests.kit.storage.three_fs import SlotStore, over_usrbio
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn

STORES = ("memory", "file", "3fs-sqlite", "3fs-redis", "mooncake", "s3", "s3-packs")


def make_store(name: str, request: pytest.FixtureRequest) -> StoreUnderTest:
    """A new store of this kind, for the fixture that `request` is of; skips where it cannot be."""
    folder: Path = request.getfixturevalue("tmp_path")
    match name:
        case "memory":
            return MemoryStore()
        case "file":
            return FileStore(folder / "store")
        case "3fs-sqlite":
            return _slots(folder, f"sqlite://{folder}/index.db", request)
        case "3fs-redis":
            return _slots(folder, request.getfixturevalue("redis_server").url(), request)
        case "3fs-usrbio":
            rings = over_usrbio(UsrbioStandIn(), str(folder / "store"))
            return _slots(folder, f"sqlite://{folder}/index.db", request, rings)
        case "mooncake":
            return _fixture("shared", request)
        case "s3":
            return _fixture("bucket", request)
        case "s3-packs":
            return _fixture("packed", request)
        case _:
            raise ValueError(name)


def _slots(
    folder: Path,
    index: str,
    request: pytest.FixtureRequest,
    make_rings: Callable[[], RingClient] | None = None,
) -> SlotStore:
    store = SlotStore(folder / "store", index, make_rings=make_rings)
    request.addfinalizer(store.clean)
    return store


def _fixture(name: str, request: pytest.FixtureRequest) -> StoreUnderTest:
    store: StoreUnderTest = request.getfixturevalue(name)
    return store
