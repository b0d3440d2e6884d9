"""Settings of every test: deterministic examples, a check for leaks, no silent skips in CI."""

import logging
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.kit.launch.ray_clusters import two_nodes
from tests.kit.left_behind import nothing_left_behind

if TYPE_CHECKING:
    from tests.kit.launch.in_process import Run

# Start one Ray cluster for all test modules, because its start takes seconds.
__all__ = ["two_nodes"]

# Hypothesis draws the same examples in every run, and has no deadline, because the machine may stall.
settings.register_profile("lockstep", derandomize=True, deadline=None)
settings.load_profile("lockstep")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make scenarios` rewrite the expected output of scenarios."""
    parser.addoption("--write-scenarios", action="store_true", help="write what comes out of them")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Generator[None]:
    """Fail a test that leaves a running store, or an event loop with tasks; restore the log level."""
    log = logging.getLogger("lockstep")
    level = log.level
    with nothing_left_behind():
        yield
    log.setLevel(level)


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> "Iterator[Run]":
    """Run the `lockstep` command in this process."""
    # Import the command only here, because most tests do not need it, and some run without torch.
    from tests.kit.launch.in_process import run_lockstep

    yield from run_lockstep(monkeypatch, capfd)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` if there is no CUDA device."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, fail a skipped test unless it needs a GPU."""
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and item.get_closest_marker("gpu") is None:
        _fail_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI, fail a module that skips itself; otherwise its missing tests would go unnoticed."""
    report = yield
    if report.skipped:
        _fail_in_ci(report)
    return report


def _fail_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") != "true":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"Skipped where CI=true, so nothing was tested. {reason}"
