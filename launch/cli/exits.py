"""Exit statuses of the command's processes, and the error line that they print."""

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from ...errors import ConfigError, LockstepError, UsageError
from .options import option

_CANNOT_PRINT: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Errors of a write to a full or failing disk."""

EXIT_FAULT = 1
"""Exit status if the replay showed a fault, or the program has a bug."""
EXIT_CONFIG = 2
"""Exit status if the settings or the input are wrong."""
EXIT_GROUP = 3
"""Exit status if the ranks could not continue."""


def exit_code(error: LockstepError) -> int:
    """Return the exit status of a process that `error` stops."""
    return EXIT_CONFIG if isinstance(error, ConfigError | UsageError) else EXIT_GROUP


def in_options(line: str) -> str:
    """Return a user's message as one line, with settings replaced by the names of their options."""
    line = line.replace("timeouts.round_s", option("round_timeout_s"))
    return f"lockstep: {' '.join(line.split())}"


def say(line: str) -> None:
    """Print one line for the user to stderr."""
    # If stderr cannot be written, the exit status still reports the failure.
    with suppress(OSError):
        print(in_options(line), file=sys.stderr, flush=True)


@contextmanager
def printing() -> Generator[None]:
    """Flush stdout at the end; raise `LockstepError` if the output cannot be written.

    `BrokenPipeError` is raised unchanged, because then the reader has closed the pipe.
    """
    try:
        try:
            yield
        finally:
            # Flush here, because a failed flush in the interpreter's shutdown prints a traceback.
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
    """Redirect stdout to /dev/null, because the interpreter flushes it again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
