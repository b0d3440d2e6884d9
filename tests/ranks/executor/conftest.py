"""Fixtures shared by the tests of executors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from lockstep.ranks.executor.executor import RankExecutor
from tests.kit.ranks.executor_parts import make_executor


@pytest.fixture
def made() -> Iterator[Callable[..., RankExecutor]]:
    """Return `make_executor`; its executors are closed at teardown, also if the test fails."""
    with ExitStack() as end:

        def make(*args: Any, **options: Any) -> RankExecutor:
            return end.enter_context(closing(make_executor(*args, **options)))

        yield make
