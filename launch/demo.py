"""`lockstep demo`: replay one workload twice on one store, cold and warm, and compare the two."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from ..errors import ConfigError
from ..small_engine.profiles import find_profile
from ..storage_backends.uri import StoreUri, parse_uri
from .cli.options import OF_A_GROUP, ReportFile, check_store, command_line
from .cli.replay_settings import ReplaySettings
from .cli.report_files import check_that_writable, write_report
from .replay.launching import launch
from .replay.options import EXIT_STATUSES, LaunchChoice
from .replay.outcome import VIEWER, table_of
from .replay.plots import check_that_drawable
from .replay.reading import write_page
from .replay.report import Report, read_report

demo = command_line("demo", help_epilogue=EXIT_STATUSES)


@demo.default
def _demo(
    *,
    store: Annotated[
        str | None,
        Parameter(
            help="Store for both runs, for example file:///var/demo; it is kept. The directory must be"
            " empty.",
            show_default="a temporary one, removed at the end",
            metavar="URI",
        ),
    ] = None,
    ranks: Annotated[int, OF_A_GROUP, Parameter(help="Number of ranks.")] = 2,
    report: ReportFile = None,
    timeline: Annotated[
        Path | None,
        Parameter(
            help=f"Write the timeline of the warm run here, as trace events for {VIEWER}.",
            show_default="none",
            metavar="FILE.json",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        Parameter(
            help="Write a page with plots of both runs here (extra `reports`).",
            show_default="none",
            metavar="FILE.html",
        ),
    ] = None,
) -> int:
    """Replay the built-in workload twice, cold and warm.

    The report contains both runs, under `cold` and `warm`.
    """
    if store is not None:
        check_store(store)
        _check_that_unused(parse_uri(store))
    _check_files(timeline, page)
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
            # Make the pools too small for the workload, so that every tier is used.
            device_pages=192,
            host_pages=512,
        )
        console.print(find_profile(settings.profile).scale, soft_wrap=True)
        status, reports = _replay_twice(settings, Path(scratch), timeline)
        if status:
            return status
        console.print(table_of(reports))
        both = report or Path(scratch) / "both.json"
        write_report(both, reports)
        if page is not None:
            write_page(both, page)
            console.print(f"plots of both runs: {page.resolve()}", soft_wrap=True)
    if timeline is not None:
        message = f"timeline of the warm run: {timeline.resolve()}, for {VIEWER}"
        console.print(message, soft_wrap=True)
    return 0


def _check_files(timeline: Path | None, page: Path | None) -> None:
    if page is not None:
        check_that_drawable()
        check_that_writable(page)
    if timeline is not None:
        check_that_writable(timeline, "timeline")


def _replay_twice(
    settings: ReplaySettings, scratch: Path, timeline: Path | None
) -> tuple[int, dict[str, Report]]:
    """Replay cold, then warm; return (exit status, reports by run).

    A run that fails ends the demo, and its exit status is returned.
    """
    reports: dict[str, Report] = {}
    for run in ("cold", "warm"):
        path = scratch / f"{run}.json"
        drawn = str(timeline.resolve()) if timeline is not None and run == "warm" else None
        status = launch(replace(settings, report=str(path), timeline=drawn), LaunchChoice())
        if status:
            return status, reports
        reports[run] = read_report(path)
    return 0, reports


def _check_that_unused(store: StoreUri) -> None:
    """Raise `ConfigError` if the demo's store is not a directory or is not empty."""
    directory = Path(store.path)
    if store.scheme != "file" or not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(
            f"--store: {directory} is not a directory; the demo creates its store in a directory"
        )
    if any(directory.iterdir()):
        raise ConfigError(f"--store: {directory} is not empty; the demo needs an empty store")
