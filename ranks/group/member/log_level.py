"""Log handler and log level of this process."""

import logging
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"


def write_log() -> None:
    """Log to standard error, unless the application has installed handlers."""
    log = logging.getLogger("lockstep")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        log.addHandler(handler)


def log_from(level: str) -> None:
    """Set the log level to `level`, a Python level name in lower case."""
    log = logging.getLogger("lockstep")
    log.setLevel(level.upper())
    # Python's handler of last resort drops everything below WARNING.
    write_log()
    # vLLM's handlers, which Lockstep inherits, have levels too; the root's handlers are not touched.
    for each in log.handlers:
        each.setLevel(min(each.level, log.level))
    log.info("logs from %s on", level)
