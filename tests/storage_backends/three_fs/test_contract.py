"""`3fs://` keeps the storage contract with each kind of transfer."""

from collections.abc import Generator
from pathlib import Path

import pytest

from lockstep.storage_backends.three_fs.usrbio import choose_transfers
from tests.kit.storage.contract import ListingContract, StorageContract
from tests.kit.storage.three_fs import SlotStore, over_usrbio
from tests.kit.storage.usrbio_stand_in import UsrbioStandIn


@pytest.fixture(params=["preadv", "usrbio"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[SlotStore]:
    root = tmp_path / "store"
    over = over_usrbio(UsrbioStandIn()) if request.param == "usrbio" else choose_transfers
    store = SlotStore(root, tmp_path / "index.db", make_transfers=over)
    yield store
    store.clean()


class TestThreeFs(StorageContract, ListingContract):
    """The storage contract, over 3FS."""
