"""Tests of stores are coroutines: each runs in an event loop of its own."""

import asyncio
import inspect

import pytest

from tests.kit.storage.layers import VirtualTimeLoop

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
