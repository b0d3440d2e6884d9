"""The `lockstep` command and its subcommands.

Wrong input is reported in one line on stderr. Exit statuses:
- 1: the run showed a fault
- 2: wrong input or options
- 3: the group could not continue
- 4: the search for a revived bug did not find it
- 5: a replay refused requests
- 70: the simulator itself failed
- 130: interrupted
"""

import os
import sys
from typing import Final

from ..errors import ConfigError, LockstepError
from .cli.amounts import LINE_MAX, printable
from .cli.environment import prepare_for_mooncake
from .cli.exits import printing
from .cli.interruption import (
    EXIT_INTERRUPTED,
    Interrupted,
    ignore_signals,
    raise_on_signals,
    was_interrupted,
)
from .cli.options import command_line, run_command

_STDERR: Final = 2

app = command_line(
    "lockstep",
    help="A KV cache for tensor-parallel inference that stays the same on every rank."
    " Begin with `lockstep demo`; `lockstep COMMAND --help` shows the options.",
)
# Name each subcommand by its dotted path, so that its module is imported only when it runs.
for _command, _help in {
    "lockstep.launch.demo:demo": "Replay the built-in workload twice, cold and warm.",
    "lockstep.launch.replay.launching:replay": (
        "Serve a workload on real ranks, and check every page."
    ),
    "lockstep.launch.simulate:simulate": "Explore schedules with faults, in virtual time.",
    "lockstep.launch.bench:bench": "Measure costs, each next to its limit.",
    "lockstep.launch.top.top_command:top": "Watch a running group: its hits and why it misses.",
    "lockstep.launch.ctl:ctl": "Send requests to a running group: pin, drop, limit.",
    "lockstep.launch.planning.plan:plan": "Predict the hits of caches of any size on a trace.",
    "lockstep.launch.planning.size:size": "Show a model's KV bytes per token and what fits.",
    "lockstep.launch.store.store_command:store": "List, verify and clean up a store.",
    "lockstep.launch.replay.reading:report": "Show the report of a run as one HTML page.",
    "lockstep.launch.doctor.doctor_command:doctor": "Check whether this machine can run ranks.",
}.items():
    app.command(_command, name=_command.rpartition(":")[2], help=_help)


def main() -> None:
    """Run the command. This is the entry point of `lockstep`."""
    try:
        raise_on_signals()
        _fill_closed_streams()
        prepare_for_mooncake()
        with printing():
            status = run_command(app, sys.argv[1:])
        sys.exit(status)
    except LockstepError as error:
        _end(str(error), 2 if isinstance(error, ConfigError) else 3)
    except Interrupted:
        _end("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The program that reads our output has closed the pipe, so do not report an error.
        sys.exit(1)
    except Exception:
        # Report an interruption after any exception, because a library that is being imported may
        # replace `Interrupted` by another exception.
        if not was_interrupted():
            raise
        _end("interrupted", EXIT_INTERRUPTED)


def _fill_closed_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no file gets descriptor 0, 1 or 2."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(opened, True)
    os.close(opened)


def _end(line: str, status: int) -> None:
    ignore_signals()
    print(f"lockstep: {printable(' '.join(line.split()), LINE_MAX)}", file=sys.stderr)
    sys.exit(status)
