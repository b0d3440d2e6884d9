"""What every test of `s3://` needs: keys in the environment, whether it has a bucket or none."""

import pytest


@pytest.fixture(autouse=True)
def _signed(keys: None) -> None:
    """Let every request be signed."""
