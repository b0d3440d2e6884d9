"""`3fs://` keeps the promises of every backend, with each index and each kind of rings."""

import pytest

from tests.kit.storage.by_name import make_store
from tests.kit.storage.calls import StoreUnderTest
from tests.kit.storage.contract import StorageContract


@pytest.fixture(params=["3fs-sqlite", "3fs-redis", "3fs-usrbio"])
def store(request: pytest.FixtureRequest) -> StoreUnderTest:
    return make_store(request.param, request)


class TestThreeFs(StorageContract):
    pass
