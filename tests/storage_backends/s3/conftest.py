"""Credentials in the environment for every test of `s3://`, with or without a bucket."""

import pytest


@pytest.fixture(autouse=True)
def _signed(keys: None) -> None:
    """Give every test credentials, so that requests are signed."""
