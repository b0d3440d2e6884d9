"""Two ranks over a store with a server or an index: the next run finds the pages of the first."""

from pathlib import Path

import pytest

from tests.kit.launch.replays import replay
from tests.kit.servers.mooncake_master import MooncakeStore, mooncake_store
from tests.kit.storage.s3 import BucketStore
from tests.kit.storage.s3_fixtures import bucket, keys, s3_endpoint

__all__ = ["bucket", "keys", "mooncake_store", "s3_endpoint"]

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

SLOTS = "slot_bytes=139264&file_slots=2048"
"""Sizes of a small `3fs://` store that still holds the pages and the manifest."""


@pytest.fixture(params=["3fs", "mooncake", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of an empty store of each kind, with its real server if it needs one."""
    match request.param:
        case "3fs":
            return f"3fs://{tmp_path}/store?index=sqlite://{tmp_path}/index.db&{SLOTS}"
        case "mooncake":
            store: MooncakeStore = request.getfixturevalue("mooncake_store")
            return f"mooncake://{store.master.address}"
        case _:
            objects: BucketStore = request.getfixturevalue("bucket")
            return objects.uri()


def test_what_a_group_has_persisted_the_next_one_finds(store_uri: str, tmp_path: Path) -> None:
    # Pages are large, so that there are few requests to the tests' S3 server, which is slow.
    arguments = ("--ranks", 2, "--requests", 60, "--page-tokens", 512, "--store", store_uri)

    cold, warm = (replay(tmp_path / f"{name}.json", *arguments) for name in ("cold", "warm"))

    assert (cold["pages_corrupt"], cold["operations_left"], cold["violations"]) == (0, 0, [])
    assert (warm["pages_corrupt"], warm["operations_left"], warm["violations"]) == (0, 0, [])
    assert cold["hit_tokens"]["storage"] == 0
    assert warm["hit_tokens"]["storage"] > 0
    assert warm["bytes"]["l3_to_l2"] > 0
