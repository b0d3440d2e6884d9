"""What tests of `3fs://` share: the kinds of indexes."""

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "redis"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an index of each kind is."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/index.db"
    url: str = request.getfixturevalue("redis_server").url()
    return url
