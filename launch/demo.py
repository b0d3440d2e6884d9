"""The demonstration: one workload twice on one store, cold and warm, side by side."""

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..errors import ConfigError
from ..storage_backends.uri import without_secrets
from .command import launch
from .options import LaunchChoice
from .outcome import table_of
from .profiles import find_profile
from .report import Report, read_report, write_report
from .settings import ReplaySettings


def run_demo(*, ranks: int, directory: Path | None, report: Path | None) -> int:
    """Run the two replays, print the comparison, and return the status to exit with.

    `directory` becomes the store and is kept; None stands for a temporary one. `report` gets one
    JSON object with the reports of both runs under `cold` and `warm`.
    """
    if directory is not None:
        _check_that_unused(directory)
    console = Console(highlight=False, emoji=False)
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-demo-") as scratch,
        nullcontext(directory) if directory else tempfile.TemporaryDirectory() as place,
    ):
        settings = ReplaySettings(
            ranks=ranks,
            store=Path(place).resolve().as_uri(),
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
            status = launch(replace(settings, report=str(path)), LaunchChoice())
            if status:
                return status
            reports[run] = read_report(path)
    console.print(table_of(reports))
    if report is not None:
        write_report(str(report), dict(reports))
    return 0


def _check_that_unused(directory: Path) -> None:
    if ":/" in str(directory):
        shown = without_secrets(str(directory))
        raise ConfigError(f"--store is {shown!r}; the demo takes a directory, not a URI")
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; the demo makes its store in one")
    if any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; the demo starts with a store of its own")
