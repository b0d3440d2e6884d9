"""How far a command on a store is: a bar on a terminal, silence elsewhere."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class StoreProgress:
    """Shows the progress of one command, in objects and bytes."""

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
        """Begin another piece of work; its size is None where it is not known yet.

        `moves` says that it moves the objects' bytes, which have a speed then.
        """
        if self._bars is None:
            return
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._objects, self._total = 0, objects or 0
        self._bars.add_task(what, total=nbytes, objects="", moves=moves)

    def advance(self, objects: int, nbytes: int) -> None:
        """Note that so many objects more, with so many bytes, are done."""
        if self._bars is None:
            return
        self._objects += objects
        total = f" of {self._total:,}" if self._total else ""
        for task in self._bars.task_ids:
            self._bars.update(task, advance=nbytes, objects=f"{self._objects:,}{total} objects")


@contextmanager
def store_progress() -> Generator[StoreProgress]:
    """Yield what to tell of the progress. Draws on the standard error output if it is a terminal."""
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
        """The speed of what moves bytes."""

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
