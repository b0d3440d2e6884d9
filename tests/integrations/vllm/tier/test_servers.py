"""Chunks go through stores that are servers, and what they lose is a miss."""

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from lockstep.integrations.blocking_store import BlockingStore
from tests.kit.servers.mooncake_master import MooncakeStore, mooncake_store
from tests.kit.storage.s3_fixtures import bucket, keys, s3_endpoint
from tests.kit.vllm.tier.transfer_bench import Bench, values
from tests.kit.vllm.tier.transfer_bench import keys as chunks

if TYPE_CHECKING:
    from tests.kit.storage.s3 import BucketStore

__all__ = ["bucket", "keys", "mooncake_store", "s3_endpoint"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def in_mooncake(mooncake_store: MooncakeStore) -> str:
    return f"mooncake://{mooncake_store.master.address}"


@pytest.fixture
def in_s3(bucket: "BucketStore") -> str:
    return bucket.uri()


@pytest.mark.parametrize("kind", ["in_mooncake", "in_s3"])
def test_chunks_come_back_and_what_is_not_there_is_a_miss(
    kind: str, request: pytest.FixtureRequest
) -> None:
    store = BlockingStore(request.getfixturevalue(kind), "a test")
    bench = Bench(store)
    store.open(bench.transfers.memory, 60.0)
    with closing(store):
        (written,) = bench.written(chunks(1, 2, 3), [0, 1, 2])
        bench.rows[:] = 0
        bench.read(1, chunks(3, 9, 1), [5, 6, 7])
        (read,) = bench.ended()

    assert written.went_well
    assert (read.well(), read.not_well()) == (chunks(3, 1), chunks(9))
    assert values(bench) == [0, 0, 0, 0, 0, 3, 0, 1]
