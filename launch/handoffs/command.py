"""The command `lockstep simulate-handoff` and its options."""

from typing import Annotated

import typer

from ..options import ReportFile
from ..report import check_that_writable


def simulate_handoff(
    *,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds to explore, A:B: from A up to B - 1.",
            show_default="0:100; 0:2000 with --revive",
        ),
    ] = None,
    prefill_ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks of the group that prefills: 1, 2, 4 or 8.",
            show_default="drawn by the seed",
        ),
    ] = None,
    decode_ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks of the group that decodes: 1, 2, 4 or 8.",
            show_default="drawn by the seed",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Model: llama, gemma, qwen-next or hybrid-all.",
            show_default="drawn by the seed, or what --revive needs",
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            help="What goes wrong: calm, mixed, or one kind alone, as docs/disaggregation.md has them.",
            show_default="mixed, or what --revive needs",
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Pipeline depth, 0 or 1.", show_default="both in turn")
    ] = None,
    revive: Annotated[
        str | None,
        typer.Option(
            help="Put a bug back, and stop at the first schedule that finds it; `--revive list` tells"
            " their names. Exits with 1 if it is found and with 4 if not.",
            show_default="none",
            metavar="BUG",
        ),
    ] = None,
    report: ReportFile = None,
) -> None:
    """Explore handoffs between two groups, with faults, in virtual time."""
    from .exploring import choose_exploration, list_bugs, run_exploration

    if revive == "list":
        list_bugs()
        return
    if report is not None:
        check_that_writable(str(report))
    exploration = choose_exploration(
        seeds=seeds,
        ranks=(prefill_ranks, decode_ranks),
        profile=profile,
        faults=faults,
        depth=depth,
        revive=revive,
    )
    raise typer.Exit(run_exploration(exploration, report))
