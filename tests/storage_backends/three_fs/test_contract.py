"""`3fs://` keeps the promises of every backend, with each index and each kind of rings."""

from collections.abc import Generator
from pathlib import Path

import pytest

from lockstep.storage_backends.three_fs.usrbio_rings import UsrbioRings
from tests.kit.storage.contract import StorageContract
from tests.kit.storage.three_fs import SlotStore
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn


@pytest.fixture(params=["sqlite", "redis", "sqlite-usrbio"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[SlotStore]:
    index = f"sqlite://{tmp_path}/index.db"
    root = tmp_path / "store"
    match request.param:
        case "redis":
            made = SlotStore(root, request.getfixturevalue("redis_server").url())
        case "sqlite-usrbio":
            made = SlotStore(
                root, index, make_rings=lambda: UsrbioRings(UsrbioStandIn(), str(root))
            )
        case _:
            made = SlotStore(root, index)
    yield made
    made.clean()


class TestThreeFs(StorageContract):
    pass
