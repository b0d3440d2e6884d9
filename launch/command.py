"""The command `lockstep`, with a subcommand for each use.

Whatever is wrong with the input is said in one line on the standard error output, with exit status
2; a run that shows a fault ends with 1, a group that could not go on with 3, a search for a revived bug
that did not find it with 4, a replay that refused requests with 5, a simulation that broke down itself
with 70, an interrupted run with 130.
"""

import errno
import os
import sys
from typing import Final

from ..errors import ConfigError, LockstepError
from .cli.amounts import LINE_MAX, printable
from .cli.environment import prepare_for_mooncake
from .cli.interruption import EXIT_INTERRUPTED, Interrupted, ignore_signals, raise_on_signals
from .cli.options import command_line, run_command

_CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a full disk, or one that fails, says to whoever prints to a file on it."""

app = command_line(
    "lockstep",
    help="A KV cache for tensor-parallel inference that stays the same on every rank."
    " Begin with `lockstep demo`; `lockstep COMMAND --help` tells the rest.",
)
# Each is imported when it is wanted, so that all others start without it.
for _command, _help in {
    "lockstep.launch.demo:demo": "Replay the built-in workload twice, cold and warm.",
    "lockstep.launch.replay.launching:replay": (
        "Serve a workload on real ranks, and check every page."
    ),
    "lockstep.launch.simulate:simulate": "Explore schedules with faults, in virtual time.",
    "lockstep.launch.bench:bench": "Measure what things cost, each beside its limit.",
    "lockstep.launch.top.command:top": "Watch a running group: what it hits, and why no more.",
    "lockstep.launch.ctl:ctl": "Ask a running group for something: pin, drop, limit.",
    "lockstep.launch.planning.plan:plan": "Say what caches of any size would hit on a trace.",
    "lockstep.launch.planning.size:size": "Say what a model keeps for a token, and what fits.",
    "lockstep.launch.store.command:store": "Look into a store, verify it, tidy it.",
    "lockstep.launch.replay.reading:report": "Show the report of a run as one page.",
    "lockstep.launch.doctor.command:doctor": "Say whether this machine has what ranks need.",
}.items():
    app.command(_command, name=_command.rpartition(":")[2], help=_help)


def main() -> None:
    """Run the command; the entry point of `lockstep`."""
    try:
        raise_on_signals()
        prepare_for_mooncake()
        try:
            status = run_command(app, sys.argv[1:])
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


def _end(line: str, status: int) -> None:
    ignore_signals()
    print(f"lockstep: {printable(' '.join(line.split()), LINE_MAX)}", file=sys.stderr)
    sys.exit(status)


def _drop_output() -> None:
    """Let what is still to be printed go nowhere, since the interpreter tries once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
