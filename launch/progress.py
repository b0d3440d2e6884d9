"""The progress bar of a replay, on a terminal; silence elsewhere."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

OnDone = Callable[[int, int], None]
"""Told how many requests have left the system, and how many there are."""


def nothing(_done: int, _total: int) -> None:
    """Show nothing."""


@contextmanager
def progress_bar(*, shown: bool) -> Generator[OnDone]:
    """Yield what to tell of the progress. Draws on the standard error output if it is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
