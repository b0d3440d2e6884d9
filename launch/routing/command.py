"""The command `lockstep simulate-router` and its options."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import ReportFile
from ..report import check_that_writable


def simulate_router(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Trace to route, JSONL or that in gzip; without it the built-in workload."
        ),
    ] = None,
    *,
    groups: Annotated[int, typer.Option(help="Groups that compute prompts.")] = 4,
    device_pages: Annotated[
        int | None,
        typer.Option(
            help="Device memory of each group, in pages of 512 tokens.",
            show_default="with which one group alone hits half of what is possible",
        ),
    ] = None,
    tokens_per_s: Annotated[
        float, typer.Option(help="Tokens of prompts that a group computes in a second.")
    ] = 10_000.0,
    attention_tokens: Annotated[
        int,
        typer.Option(
            help="Position at which a token costs twice what the first does; 0: all cost the same."
        ),
    ] = 0,
    lag_s: Annotated[
        float, typer.Option(help="How long KV events are on their way to the router.")
    ] = 0.1,
    loads: Annotated[
        str,
        typer.Option(help="How much comes, as parts of what the groups can serve in round robin."),
    ] = "0.5,0.9,1.1",
    skip: Annotated[int, typer.Option(help="Leave out the first so many requests.")] = 0,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Take only so many requests.",
            show_default="the whole trace; 2000 of the built-in workload",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of the built-in workload, and of times that a trace leaves open."),
    ] = 0,
    report: ReportFile = None,
) -> None:
    """Compare ways to route a trace to groups, in virtual time."""
    from ...simulation.routing.comparison import ComparisonSettings
    from .comparing import run_comparison

    if report is not None:
        check_that_writable(str(report))
    run_comparison(
        trace=trace,
        skip=skip,
        requests=requests,
        seed=seed,
        loads=loads,
        settings=ComparisonSettings(
            groups=groups,
            device_pages=device_pages,
            tokens_per_s=tokens_per_s,
            attention_tokens=attention_tokens,
            lag_s=lag_s,
        ),
        report=report,
    )
