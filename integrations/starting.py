"""How a plug-in speaks to a user who starts an engine: in its log, and before it reads weights."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from ..errors import ConfigError, LockstepError


class Lockstep(LockstepError):
    """Ends an engine's start: the last line of the log is the name of this class and what is wrong.

    It is no `ValueError`, which an engine's own checks would make other errors of.
    """


# A traceback leaves out the name of this module alone.
Lockstep.__module__ = "builtins"


@contextmanager
def ending_the_start() -> Generator[None]:
    """Raise what is wrong with the configuration as `Lockstep`."""
    try:
        yield
    except ConfigError as error:
        raise Lockstep(str(error)) from None


def log_as(engine: str) -> None:
    """Log with the handlers, and so in the format, of the engine's logger of this name.

    Does nothing where Lockstep's logger has handlers already, or the engine's has none.
    """
    ours, theirs = logging.getLogger("lockstep"), logging.getLogger(engine)
    if ours.handlers or not theirs.handlers:
        return
    for each in theirs.handlers:
        ours.addHandler(each)
    ours.propagate = False
    if not ours.level:
        ours.setLevel(theirs.level)
