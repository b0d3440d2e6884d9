"""Makes plug-ins log through the engine's log, and stop the engine's start on a `ConfigError`."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from ..errors import ConfigError, LockstepError


class Lockstep(LockstepError):
    """Raised to stop the engine's start; its class name and message form the last line of the log.

    Not a `ValueError`, because engines convert a `ValueError` to other errors.
    """


# Set the module to `builtins`, because a traceback omits the module name only for this module.
Lockstep.__module__ = "builtins"


@contextmanager
def ending_the_start() -> Generator[None]:
    """Convert a `ConfigError` raised in this context to the exception `Lockstep`.

    This exception stops the engine's start.
    """
    try:
        yield
    except ConfigError as error:
        raise Lockstep(str(error)) from None


def log_as(engine: str) -> None:
    """Add the handlers of the engine's logger `engine` to Lockstep's logger, so that both log alike.

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
