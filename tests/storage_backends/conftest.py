"""Run each coroutine test of a store in a separate event loop; define the stores' fixtures."""

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
    """Register the pytest mark that makes a module or a test run on virtual time."""
    config.addinivalue_line("markers", f"{VIRTUAL_TIME}: the clock jumps to what is waited for")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test to completion; return None to leave any other test to pytest."""
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
    """A file store in an empty directory, for test modules without a `store` fixture of their own."""
    return FileStore(tmp_path / "store")


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from run_lockstep(monkeypatch, capfd, "store")
