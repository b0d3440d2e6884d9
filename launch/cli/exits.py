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
"""Values of `errno` if stdout cannot be written, because the disk is full or the stream is broken."""

EXIT_FAULT = 1
"""Exit status if a replay found a fault, or the program has a bug."""
EXIT_CONFIG = 2
"""Exit status if the settings or the input are wrong."""
EXIT_GROUP = 3
"""Exit status if the group of ranks could not continue."""


def exit_code(error: LockstepError) -> int:
    """Return the exit status of a process that `error` stops."""
    return EXIT_CONFIG if isinstance(error, ConfigError | UsageError) else EXIT_GROUP


def in_options(line: str) -> str:
    """Return an error's message on one line, with option names in place of setting names."""
    line = line.replace("timeouts.round_s", option("round_timeout_s"))
    return f"lockstep: {' '.join(line.split())}"


def say(line: str) -> None:
    """Print one line for the user to stderr."""
    # If stderr cannot be written, only the exit status reports the failure.
    with suppress(OSError):
        print(in_options(line), file=sys.stderr, flush=True)


@contextmanager
def printing() -> Generator[None]:
    """Flush stdout at the end; raise `LockstepError` if the output cannot be written.

    `BrokenPipeError` is raised unchanged. It is not a failure, because the reader has closed the pipe.
    """
    try:
        try:
            yield
        finally:
            # Flush here, because Python prints a traceback if its own flush at shutdown fails.
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
    """Redirect stdout to /dev/null, so that Python's own flush at exit does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
