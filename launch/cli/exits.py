"""The statuses with which a process of the command ends, and the line that it says before."""

import sys

from ...errors import ConfigError, LockstepError, UsageError
from .options import option

EXIT_FAULT = 1
"""The replay ran and showed a fault, or the program has one."""
EXIT_CONFIG = 2
"""The settings or the input are wrong."""
EXIT_GROUP = 3
"""The ranks could not go on."""


def exit_code(error: LockstepError) -> int:
    """Return the status with which a process ends after `error`."""
    return EXIT_CONFIG if isinstance(error, ConfigError | UsageError) else EXIT_GROUP


def in_options(line: str) -> str:
    """Return a line for the user as it is printed: one line, with options by their names."""
    line = line.replace("timeouts.round_s", option("round_timeout_s"))
    return f"lockstep: {' '.join(line.split())}"


def say(line: str) -> None:
    """Print one line for the user to the standard error output."""
    print(in_options(line), file=sys.stderr, flush=True)
