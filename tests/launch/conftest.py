"""What tests of the command start from: the command itself."""

from collections.abc import Iterator

import pytest

from tests.kit.launch.in_process import Run, run_lockstep


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the command in this process."""
    yield from run_lockstep(monkeypatch, capfd)
