"""Progress of a replay: a bar on a terminal, otherwise one line a minute."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ...small_engine.counts import ReplayCounts

PAUSE_S: Final = 60.0
"""Without a terminal: seconds between two progress lines, and from the start to the first line."""


class Progress(NamedTuple):
    """Counts of a replay so far: finished requests, all requests, prompt tokens and hit tokens."""

    done: int
    """Number of finished requests."""
    total: int
    prompt_tokens: int = 0
    hit_tokens: int = 0

    @classmethod
    def of(cls, done: int, total: int, counts: ReplayCounts) -> "Progress":
        """Return the progress of a replay, given the counters of one rank."""
        return cls(done, total, counts.prompt_tokens, counts.prompt_tokens - counts.computed_tokens)

    @property
    def hits(self) -> str:
        """Share of prompt tokens that were cached, as text; empty before the first prompt token."""
        if not self.prompt_tokens:
            return ""
        return f"{100 * self.hit_tokens / self.prompt_tokens:.1f} % hit"


OnDone = Callable[[Progress], None]
"""Type of a function that is called with a replay's progress."""


def nothing(_progress: Progress) -> None:
    """Ignore the progress of a replay; the default of functions that report progress."""


@contextmanager
def progress_bar(*, shown: bool, clock: Callable[[], float] = time.monotonic) -> Generator[OnDone]:
    """Yield a function that shows a replay's progress on stderr."""
    if not shown:
        yield nothing
        return
    if not sys.stderr.isatty():
        yield _lines(clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    hits = TextColumn("{task.fields[hits]}")
    columns = ("requests", BarColumn(), MofNCompleteColumn(), hits, TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=None, hits="")
        yield lambda now: bar.update(task, completed=now.done, total=now.total, hits=now.hits)


def _lines(clock: Callable[[], float]) -> OnDone:
    due = clock() + PAUSE_S

    def tell(now: Progress) -> None:
        nonlocal due
        if clock() < due:
            return
        due = clock() + PAUSE_S
        hits = f", {now.hits}" if now.hits else ""
        line = f"lockstep: {now.done:,} of {now.total:,} requests{hits}"
        print(line, file=sys.stderr, flush=True)

    return tell
