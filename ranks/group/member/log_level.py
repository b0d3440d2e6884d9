"""How this process logs what Lockstep says, and from which level on."""

import logging
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"


def write_log() -> None:
    """Log to the standard error output, unless the application has handlers of its own."""
    log = logging.getLogger("lockstep")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        log.addHandler(handler)


def log_from(level: str) -> None:
    """Log from a level on, which is one of Python's in lower case."""
    log = logging.getLogger("lockstep")
    log.setLevel(level.upper())
    # Python's own handler of last resort leaves out what is less than a warning.
    write_log()
    # Those of vLLM, which Lockstep shares, have a level of their own; the root's are the application's.
    for each in log.handlers:
        each.setLevel(min(each.level, log.level))
    log.info("logs from %s on", level)
