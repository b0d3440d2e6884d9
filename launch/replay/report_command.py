"""`lockstep report`: one page of HTML that shows what a run has reported."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...errors import ConfigError
from ..cli.report_files import check_that_writable, write_text
from .reading import page_of


def report(
    run: Annotated[
        Path, Parameter(help="A report, as --report of replay, demo or bench writes it.")
    ],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            alias="-o",
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
    print(f"wrote {target}")


def write_page(run: Path, target: Path) -> None:
    """Write the page that shows the report in `run`. Raises `ConfigError` for what cannot be."""
    check_that_writable(target)
    write_text(target, page_of(run))
