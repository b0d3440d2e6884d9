"""Fixtures of the tests of `lockstep store`: the command, and a directory for a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.launch.in_process import Run, run_lockstep
from tests.kit.launch.stores import Kept


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from run_lockstep(monkeypatch, capfd, "store")


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """The store that most tests read, initially empty."""
    return Kept(tmp_path / "kv")
