"""A listing that cannot go on to its end says so: what is missing in it would be taken for gone."""

import pytest

from lockstep.errors import StorageError
from tests.kit.storage.by_name import make_store
from tests.kit.storage.calls import StoreUnderTest, listed, put_many


@pytest.fixture(params=["file", "3fs-sqlite", "s3", "s3-packs"])
def store(request: pytest.FixtureRequest) -> StoreUnderTest:
    return make_store(request.param, request)


async def test_a_listing_that_the_close_comes_into_says_so_and_does_not_just_end(
    store: StoreUnderTest,
) -> None:
    backend = store.backend()
    await backend.open()
    await put_many(backend, range(3))
    listing = aiter(backend.objects())
    await anext(listing)
    await backend.close()

    with pytest.raises(StorageError, match="closed while it was listed; open it again"):
        _ = [each async for each in listing]
    assert await listed(backend) == []
