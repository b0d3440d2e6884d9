"""Fixtures that tests of executors share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from lockstep.ranks.executor.executor import RankExecutor
from tests.kit.ranks.executor_parts import make_executor


@pytest.fixture
def made() -> Iterator[Callable[..., RankExecutor]]:
    """`make_executor`, whose executors are closed at the end, also when the test has failed."""
    with ExitStack() as end:

        def make(*args: Any, **options: Any) -> RankExecutor:
            return end.enter_context(closing(make_executor(*args, **options)))

        yield make
