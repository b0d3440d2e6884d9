"""Logging and start-up errors of plug-ins: use the engine's log, and fail before weights are read."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from ..errors import ConfigError, LockstepError


class Lockstep(LockstepError):
    """Stops the engine at start; the last log line has this class's name and the error message.

    Not a `ValueError`, because engines convert a `ValueError` to other errors.
    """


# Set the module to `builtins`, because Python omits only this module name in a traceback.
Lockstep.__module__ = "builtins"


@contextmanager
def ending_the_start() -> Generator[None]:
    """Convert a `ConfigError` to the exception `Lockstep`, which ends the engine's start."""
    try:
        yield
    except ConfigError as error:
        raise Lockstep(str(error)) from None


def log_as(engine: str) -> None:
    """Log through the handlers, and so in the format, of the engine's logger named `engine`.

    Does nothing if Lockstep's logger already has handlers, or if the engine's logger has none.
    """
    ours, theirs = logging.getLogger("lockstep"), logging.getLogger(engine)
    if ours.handlers or not theirs.handlers:
        return
    for each in theirs.handlers:
        ours.addHandler(each)
    ours.propagate = False
    if not ours.level:
        ours.setLevel(theirs.level)
