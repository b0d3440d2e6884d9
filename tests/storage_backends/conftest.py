"""Tests of stores are coroutines, each in an event loop of its own; and what stores are made from."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.launch.in_process import Run, run_lockstep
from tests.kit.servers.mooncake_master import begun, mooncake_store, shared
from tests.kit.storage.files import FileStore, each_kind_of_file
from tests.kit.storage.layers import VirtualTimeLoop
from tests.kit.storage.s3_fixtures import bucket, keys, s3_endpoint

__all__ = [
    "begun",
    "bucket",
    "each_kind_of_file",
    "keys",
    "mooncake_store",
    "s3_endpoint",
    "shared",
]

VIRTUAL_TIME = "virtual_time"


def pytest_configure(config: pytest.Config) -> None:
    """Let a module or a test say by a mark that it goes by virtual time."""
    config.addinivalue_line("markers", f"{VIRTUAL_TIME}: the clock jumps to what is waited for")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine to its end; None leaves any other test to pytest."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    virtual = pyfuncitem.get_closest_marker(VIRTUAL_TIME) is not None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    with asyncio.Runner(loop_factory=VirtualTimeLoop if virtual else None) as runner:
        runner.run(test(**fixtures))
    return True


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store of files in a directory of its own, for a module that has none of another kind."""
    return FileStore(tmp_path / "store")


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `lockstep store` in this process."""
    yield from run_lockstep(monkeypatch, capfd, "store")
