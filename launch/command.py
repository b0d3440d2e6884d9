"""The command `lockstep`, with a subcommand for each use.

Whatever is wrong with the input is said in one line on the standard error output, with exit status
2; a run that shows a fault ends with 1, a group that could not go on with 3, a search for a revived bug
that did not find it with 4, a replay that refused requests with 5, a simulation that broke down itself
with 70, an interrupted run with 130.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from ..errors import ConfigError, LockstepError
from ..version import VERSION
from .bench import bench
from .cli.amounts import LINE_MAX, printable
from .cli.environment import prepare_for_mooncake
from .cli.interruption import EXIT_INTERRUPTED, Interrupted, ignore_signals, raise_on_signals
from .cli.settings import ReplaySettings
from .ctl import ctl
from .doctor.command import EXIT_STATUSES as DOCTOR_EXIT_STATUSES
from .doctor.command import doctor
from .planning.command import EXIT_STATUS as PLAN_EXIT_STATUS
from .planning.command import plan, size
from .replay.launching import launch
from .replay.options import EXIT_STATUSES, LaunchChoice, ReportFile, TimelineFile, replay_command
from .replay.report import check_that_writable
from .replay.report_command import report as report_command
from .store.command import store
from .top.command import top

RANKS_DEFAULT = ReplaySettings().ranks
_SimulatedRanks = Annotated[
    int | None, typer.Option(help="Number of simulated ranks.", show_default="2")
]
_Pair = Annotated[
    str | None,
    typer.Option(
        "--pd",
        help="Two groups instead, of which one hands requests over to the other: their TP sizes, as"
        " 2x1 with each 1, 2, 4 or 8, or `drawn` by the seed.",
        show_default="one group",
        metavar="PxD",
    ),
]
_CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a full disk, or one that fails, says to whoever prints to a file on it."""
_WRONG_USAGE: Final = cast(type[Exception], typer.BadParameter.__mro__[1])
"""An option, an argument or a command that is wrong, or lacks; typer has no public name for it."""

app = typer.Typer(
    name="lockstep",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Markup would read the B in `A:B:` as a picture.
    rich_markup_mode=None,
    no_args_is_help=True,
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lockstep {VERSION}")
        raise typer.Exit


@app.callback(
    help="A KV cache for tensor-parallel inference that stays the same on every rank."
    " Begin with `lockstep demo`; `lockstep COMMAND --help` tells the rest."
)
def _group(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Say what all commands are for; the options here belong to none of them."""


def main() -> None:
    """Run the command; the entry point of `lockstep`."""
    try:
        raise_on_signals()
        prepare_for_mooncake()
        try:
            status = _run()
        finally:
            # Otherwise the interpreter does it, and has only a traceback to say what went wrong.
            if sys.stdout is not None:
                sys.stdout.flush()
        sys.exit(status)
    except LockstepError as error:
        _end(str(error), 2 if isinstance(error, ConfigError) else 3)
    except Interrupted:
        _end("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever reads the output has seen enough.
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _CANNOT_PRINT or error.filename is not None:
            raise
        _drop_output()
        _end(f"the output could not be written: {error.strerror}", 3)


def _run() -> int:
    """Run the subcommand and return its status."""
    try:
        return cast(int | None, app(prog_name="lockstep", standalone_mode=False)) or 0
    except _WRONG_USAGE as error:
        wrong = cast(typer.BadParameter, error)
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(wrong.format_message(), err=True)
            return 2
        path = "lockstep" if wrong.ctx is None else wrong.ctx.command_path
        raise ConfigError(f"{wrong.format_message().rstrip('.')}; see `{path} --help`") from error


def _end(line: str, status: int) -> None:
    ignore_signals()
    typer.echo(f"lockstep: {printable(' '.join(line.split()), LINE_MAX)}", err=True)
    sys.exit(status)


def _drop_output() -> None:
    """Let what is still to be printed go nowhere, since the interpreter tries once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _replay(settings: ReplaySettings, choice: LaunchChoice) -> None:
    raise typer.Exit(launch(settings, choice))


app.command("replay", epilog=EXIT_STATUSES)(
    replay_command(_replay, ranks_default=lambda: RANKS_DEFAULT)
)

app.add_typer(bench, name="bench")
app.command("top", short_help="Watch a running group: what it hits, and why no more.")(top)
app.add_typer(ctl, name="ctl", short_help="Ask a running group for something: pin, drop, limit.")
app.command("plan", epilog=PLAN_EXIT_STATUS, short_help="Say what caches of any size would hit.")(
    plan
)
app.command("size", short_help="Say what a model keeps for a token, and what fits.")(size)
app.add_typer(store, name="store", short_help="Look into a store, verify it, tidy it.")
app.command("report", short_help="Show the report of a run as one page.")(report_command)
app.command(
    "doctor",
    epilog=DOCTOR_EXIT_STATUSES,
    short_help="Say whether this machine has what ranks need.",
)(doctor)


@app.command("demo", epilog=EXIT_STATUSES)
def demo(
    store: Annotated[
        str | None,
        typer.Option(
            help="Store for both runs, for example file:///var/demo; kept. A directory that holds"
            " anything is refused.",
            show_default="a temporary one, removed at the end",
            metavar="URI",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = RANKS_DEFAULT,
    report: ReportFile = None,
    timeline: TimelineFile = None,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with plots of both runs here (extra `reports`).",
            show_default="none",
            metavar="FILE.html",
        ),
    ] = None,
) -> None:
    """Replay the built-in workload twice, cold and warm."""
    from .demo import run_demo

    raise typer.Exit(
        run_demo(ranks=ranks, store=store, report=report, timeline=timeline, page=page)
    )


@app.command("simulate")
def simulate(
    *,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds to explore, A:B: from A up to B - 1.",
            show_default="0:100; 0:2000 with --revive",
        ),
    ] = None,
    ranks: _SimulatedRanks = None,
    pd: _Pair = None,
    steps: Annotated[int, typer.Option(help="Steps of each schedule, 100 or more.")] = 100,
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
            help="Mixture of faults and pressure: mixed, calm, storage, pressure, crash, retracts,"
            " controls.",
            show_default="mixed, or what --revive needs",
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Pipeline depth, 0 or 1.", show_default="both in turn")
    ] = None,
    l1: Annotated[
        str | None,
        typer.Option(
            "--l1",
            help="Who owns the device pages: replica, engine, or both in turn.",
            show_default="both, or what --revive needs",
        ),
    ] = None,
    revive: Annotated[
        str | None,
        typer.Option(
            help="Put an old bug back, and stop at the first schedule that finds it: A to E, or a name"
            " that `--revive list` tells. Exits with 1 if it is found and with 4 if not.",
            show_default="none",
            metavar="BUG",
        ),
    ] = None,
    report: ReportFile = None,
) -> None:
    """Explore schedules with faults, in virtual time."""
    from .simulate import choose_exploration, list_bugs, run_simulation

    if revive == "list":
        list_bugs()
        return
    if report is not None:
        check_that_writable(str(report))
    exploration = choose_exploration(
        seeds=seeds,
        ranks=ranks,
        pd=pd,
        steps=steps,
        profile=profile,
        faults=faults,
        depth=depth,
        l1=l1,
        revive=revive,
    )
    raise typer.Exit(run_simulation(exploration, report))
