"""The statuses with which a process of the command ends, and the line that it says before."""

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from ...errors import ConfigError, LockstepError, UsageError
from .options import option

_CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""The errors of a write to a full or failing disk."""

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
    # Where even that cannot be written, the status still tells.
    with suppress(OSError):
        print(in_options(line), file=sys.stderr, flush=True)


@contextmanager
def printing() -> Generator[None]:
    """Print to the standard output: raise `LockstepError` if that cannot be written.

    `BrokenPipeError` stays what it is: whoever reads the output has seen enough.
    """
    try:
        try:
            yield
        finally:
            # Otherwise the interpreter does it, and has only a traceback to say what went wrong.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        raise
    except OSError as error:
        if error.errno not in _CANNOT_PRINT or error.filename is not None:
            raise
        _drop_output()
        raise LockstepError(f"the output could not be written: {error.strerror}") from error


def _drop_output() -> None:
    """Let what is still to be printed go nowhere, since the interpreter tries once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
