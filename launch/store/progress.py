"""Progress of a `lockstep store` command: a bar on a terminal, otherwise nothing."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class StoreProgress:
    """The progress of one command, in objects and bytes."""

    def __init__(self, bars: "Progress | None") -> None:
        self._bars = bars
        self._objects = 0
        self._total = 0

    def begin(
        self,
        what: str,
        objects: int | None = None,
        nbytes: int | None = None,
        *,
        moves: bool = False,
    ) -> None:
        """Replace the progress bar for the next part of the work; `nbytes` is None if unknown.

        If `moves` is true, the work reads or writes the objects' bytes, so the bar shows a speed.
        """
        if self._bars is None:
            return
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._objects, self._total = 0, objects or 0
        self._bars.add_task(what, total=nbytes, objects="", moves=moves)

    def advance(self, objects: int, nbytes: int) -> None:
        """Advance the bar by a number of finished objects and their bytes."""
        if self._bars is None:
            return
        self._objects += objects
        total = f" of {self._total:,}" if self._total else ""
        for task in self._bars.task_ids:
            self._bars.update(task, advance=nbytes, objects=f"{self._objects:,}{total} objects")


@contextmanager
def store_progress() -> Generator[StoreProgress]:
    """Yield the progress display, on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield StoreProgress(None)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class SpeedColumn(TransferSpeedColumn):
        """Shows the speed for work that reads or writes the objects' bytes; empty for other work."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.fields["moves"] else Text("")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[objects]}", markup=False),
        SpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield StoreProgress(bars)
