"""`lockstep report`: one page of HTML that shows what a run has reported."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ConfigError


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A report, as --report of replay, demo or bench writes it.",
            metavar="RUN.json",
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the page here.",
            show_default="RUN.html beside the report",
            metavar="FILE.html",
        ),
    ] = None,
) -> None:
    """Make one page of plots and tables of a report.

    It is a single file that needs no network.
    """
    target = output or run.with_suffix(".html")
    if target == run:
        raise ConfigError(f"{target} is the report itself; give another file with --output")
    write_page(run, target)
    typer.echo(f"wrote {target}")


def write_page(run: Path, target: Path) -> None:
    """Write the page that shows the report in `run`. Raises `ConfigError` for what cannot be."""
    from .reading import page_of
    from .report import check_that_writable, write_text

    check_that_writable(str(target))
    write_text(str(target), page_of(run))
