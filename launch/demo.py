"""The demonstration: one workload twice on one store, cold and warm, side by side."""

import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..errors import ConfigError
from ..small_engine.profiles import find_profile
from ..storage_backends.uri import StoreUri, parse_uri
from .cli.option_values import check_store
from .cli.settings import ReplaySettings
from .replay.launching import launch
from .replay.options import LaunchChoice
from .replay.outcome import table_of
from .replay.plots import check_that_drawable
from .replay.report import Report, check_that_writable, read_report, write_report
from .replay.report_command import write_page
from .replay.timelines import VIEWER


def run_demo(
    *, ranks: int, store: str | None, report: Path | None, timeline: Path | None, page: Path | None
) -> int:
    """Run the two replays, print the comparison, and return the status to exit with.

    `store` is the URI of a store that holds nothing yet, or the first run is not cold; it is kept. None
    stands for a temporary directory.
    `report` gets one JSON object with the reports of both runs under `cold` and `warm`, which `page`
    shows. `timeline` gets that of the warm run.
    """
    if store is not None:
        check_store(store)
        _check_that_unused(parse_uri(store))
    if page is not None:
        check_that_drawable()
    for file in (page, report):
        if file is not None:
            check_that_writable(str(file))
    if timeline is not None:
        check_that_writable(str(timeline), "timeline")
    console = Console(highlight=False, emoji=False)
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-demo-") as scratch,
        tempfile.TemporaryDirectory() as place,
    ):
        settings = ReplaySettings(
            ranks=ranks,
            store=store or Path(place).resolve().as_uri(),
            concurrency=4,
            table=False,
            # Too small for the workload, so that every tier has something to do.
            device_pages=192,
            host_pages=512,
        )
        console.print(find_profile(settings.profile).scale, soft_wrap=True)
        reports: dict[str, Report] = {}
        for run in ("cold", "warm"):
            path = Path(scratch) / f"{run}.json"
            drawn = str(timeline.resolve()) if timeline is not None and run == "warm" else None
            status = launch(replace(settings, report=str(path), timeline=drawn), LaunchChoice())
            if status:
                return status
            reports[run] = read_report(path)
        console.print(table_of(reports))
        both = report or Path(scratch) / "both.json"
        write_report(str(both), dict(reports))
        if page is not None:
            write_page(both, page)
            console.print(f"plots of both runs: {page.resolve()}", soft_wrap=True)
    if timeline is not None:
        told = f"timeline of the warm run: {timeline.resolve()}, for {VIEWER}"
        console.print(told, soft_wrap=True)
    return 0


def _check_that_unused(store: StoreUri) -> None:
    """Raise `ConfigError` for a directory that holds anything, which the demo would not touch."""
    directory = Path(store.path)
    if store.scheme != "file" or not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(
            f"--store: {directory} is not a directory; the demo makes its store in one"
        )
    if any(directory.iterdir()):
        raise ConfigError(
            f"--store: {directory} is not empty; the demo starts with a store of its own"
        )
