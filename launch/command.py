"""The command `lockstep`: replay, simulate, demo.

Whatever is wrong with the input is said in one line on the standard error output, with exit status
2; a run that shows a fault ends with 1, a group that could not go on with 3, an interrupted one with
130.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, LockstepError
from .interruption import Interrupted, ignore_signals, raise_on_signals
from .options import LaunchChoice, ReportFile, replay_command
from .report import check_that_writable
from .settings import ReplaySettings
from .workload import requests_of

RANKS_DEFAULT = ReplaySettings().ranks

app = typer.Typer(
    name="lockstep",
    help="A KV cache for tensor-parallel inference that stays the same on every rank.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Markup would read the B in `A:B:` as a picture.
    rich_markup_mode=None,
    no_args_is_help=True,
)


def main() -> None:
    """Run the command; the entry point of `lockstep`."""
    try:
        raise_on_signals()
        app()
    except LockstepError as error:
        _end(str(error), 2 if isinstance(error, ConfigError) else 3)
    except Interrupted:
        _end("interrupted", 130)


def _end(line: str, status: int) -> None:
    ignore_signals()
    typer.echo(f"lockstep: {' '.join(line.split())}", err=True)
    sys.exit(status)


def launch(settings: ReplaySettings, choice: LaunchChoice) -> int:
    """Check what can be checked before ranks exist, replay, and return the exit status."""
    sum(1 for _ in requests_of(settings.trace, settings.seed, settings.requests))
    settings.check_memory(ranks_here=settings.ranks)
    if settings.report is not None:
        check_that_writable(settings.report)
    if choice.launcher == "ray":
        from .ray_launcher import launch_with_ray

        return launch_with_ray(settings, choice.ray_address)
    from .torch_launcher import launch_with_torch

    return launch_with_torch(settings)


def _replay(settings: ReplaySettings, choice: LaunchChoice) -> None:
    raise typer.Exit(launch(settings, choice))


app.command("replay")(replay_command(_replay, ranks_default=lambda: RANKS_DEFAULT))


@app.command("demo")
def demo(
    store: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the store; kept, and refused if it holds anything.",
            show_default="a temporary one, removed at the end",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = RANKS_DEFAULT,
    report: ReportFile = None,
) -> None:
    """Replay the built-in workload twice on one store, cold and warm, and compare the two runs."""
    from .demo import run_demo

    raise typer.Exit(run_demo(ranks=ranks, directory=store, report=report))


@app.command("simulate")
def simulate(
    *,
    seeds: Annotated[
        str, typer.Option(help="Seeds to explore, A:B: from A up to B - 1.")
    ] = "0:100",
    ranks: Annotated[int, typer.Option(help="Number of simulated ranks.")] = RANKS_DEFAULT,
    steps: Annotated[int, typer.Option(help="Steps of each schedule.")] = 100,
    profile: Annotated[str, typer.Option(help="Mixture of faults and pressure.")] = "mixed",
    depth: Annotated[
        int | None, typer.Option(help="Pipeline depth, 0 or 1.", show_default="both in turn")
    ] = None,
    l1: Annotated[
        str,
        typer.Option("--l1", help="Who owns the device pages: replica, engine or both in turn."),
    ] = "both",
    report: ReportFile = None,
) -> None:
    """Run the real replicas of all ranks under virtual time, with faults drawn from a seed."""
    from .simulate import Exploration, parse_seeds, run_simulation

    if depth not in {None, 0, 1}:
        raise ConfigError(f"--depth is {depth}, must be 0 or 1")
    if report is not None:
        check_that_writable(str(report))
    exploration = Exploration(
        seeds=parse_seeds(seeds), ranks=ranks, steps=steps, profile=profile, depth=depth, l1=l1
    )
    raise typer.Exit(run_simulation(exploration, report))
