"""The commands `lockstep plan` and `lockstep size`, and their options."""

from math import inf
from pathlib import Path
from typing import Annotated

import typer

from ...errors import ConfigError
from ..replay.options import ReportFile
from ..replay.report import check_that_writable
from .amount_lists import parse_gib, parse_share, parse_tokens, parse_words, sizes_of
from .options import Goal, KVType, ModelChoice, Policies, RanksOfModel
from .settings import PlanSettings

EXIT_STATUS = (
    "Exit status: 0, also where little is hit; 1: the --goal is not to be had; 2: wrong input."
)


def plan(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Trace, JSONL or that in gzip; without it the built-in workload."),
    ] = None,
    *,
    model: ModelChoice = "llama",
    tp: RanksOfModel = 1,
    dtype: KVType = "bfloat16",
    device_gib: Annotated[
        str, typer.Option(help="KV memory of each rank's device.", metavar="A,B,..")
    ] = "40",
    host_gib: Annotated[
        str | None,
        typer.Option(
            help="Host memory of each rank; 0 for none.",
            show_default="0,128,512,2048",
            metavar="A,B,..",
        ),
    ] = None,
    storage_gib: Annotated[
        str,
        typer.Option(
            help="What the store keeps, of all ranks together; 0 for no store, inf for no bound.",
            metavar="A,B,..",
        ),
    ] = "0",
    page_tokens: Annotated[str, typer.Option(help="Tokens of a page.", metavar="A,B,..")] = "64",
    policy: Policies = "lru",
    requests: Annotated[
        int | None,
        typer.Option(help="Take only the first so many requests.", show_default="all"),
    ] = None,
    goal: Goal = None,
    report: ReportFile = None,
) -> None:
    """Say what caches of several sizes would hit on a trace."""
    from .plan import run_plan

    if report is not None:
        check_that_writable(str(report))
    if goal is not None and host_gib is not None:
        raise ConfigError("--goal looks for the host memory; leave out --host-gib")
    host = host_gib or ("0" if goal is not None else "0,128,512,2048")
    sizes = sizes_of(
        parse_gib("--device-gib", device_gib),
        parse_gib("--host-gib", host),
        parse_gib("--storage-gib", storage_gib, endless=True),
        parse_tokens("--page-tokens", page_tokens),
        parse_words("--policy", policy),
    )
    settings = PlanSettings(
        trace=None if trace is None else str(trace),
        requests=requests,
        model=model,
        dtype=dtype,
        tp=tp,
    )
    wanted = None if goal is None else parse_share("--goal", goal)
    raise typer.Exit(run_plan(settings, sizes, wanted, report))


def size(
    *,
    model: ModelChoice = "llama",
    tp: RanksOfModel = 1,
    dtype: KVType = "bfloat16",
    tokens: Annotated[
        float, typer.Option(help="Tokens that are to be cached, for example 2e6.")
    ] = 1e6,
    page_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a page.", show_default="what is advised"),
    ] = None,
    device_gib: Annotated[float, typer.Option(help="KV memory of each rank's device (L1).")] = 40.0,
    host_gib: Annotated[float, typer.Option(help="Host memory of each rank (L2).")] = 256.0,
    storage_gib: Annotated[
        float, typer.Option(help="What the store keeps (L3), of all ranks together.")
    ] = 4096.0,
    report: ReportFile = None,
) -> None:
    """Say how many bytes a model keeps, and what fits."""
    from .size import SizeSettings, run_size

    if report is not None:
        check_that_writable(str(report))
    for name, value in (
        ("--tokens", tokens),
        ("--device-gib", device_gib),
        ("--host-gib", host_gib),
        ("--storage-gib", storage_gib),
    ):
        # Written so that it refuses what is not a number, too.
        if not 0 <= value < inf:
            raise ConfigError(f"{name} is {value}, must be 0 or more")
    settings = SizeSettings(
        model=model,
        tp=tp,
        dtype=dtype,
        tokens=int(tokens),
        page_tokens=page_tokens,
        device_gib=device_gib,
        host_gib=host_gib,
        storage_gib=storage_gib,
    )
    run_size(settings, report)
