"""Fixtures for tests of `s3://`: a server, its credentials in the environment, a bucket per test."""

from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.kit.servers.moto_server import KEYS, serve

if TYPE_CHECKING:
    from tests.kit.storage.s3 import BucketStore

_numbers = count()


@pytest.fixture(scope="session")
def s3_endpoint() -> str:
    """Start one S3 server for all tests of a process."""
    pytest.importorskip("obstore", reason="needs the extra s3")
    pytest.importorskip("moto.server", reason="needs moto[s3,server]")
    return serve()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3_endpoint: str, keys: None) -> "BucketStore":
    from tests.kit.storage.s3 import BucketStore

    return BucketStore(s3_endpoint, f"bucket-{next(_numbers)}")
