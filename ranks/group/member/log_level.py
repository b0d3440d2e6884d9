"""Log handler and log level of this process."""

import logging
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"


def write_log() -> None:
    """Install a log handler that writes to standard error, unless the application has a handler."""
    log = logging.getLogger("lockstep")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        log.addHandler(handler)


def log_from(level: str) -> None:
    """Set the log level to `level`, a Python level name in lower case."""
    log = logging.getLogger("lockstep")
    log.setLevel(level.upper())
    # Install a handler if there is none, because Python's handler of last resort drops records below
    # WARNING.
    write_log()
    # Handlers inherited from vLLM have their own levels, which must be lowered, too. Handlers of the
    # root logger keep their levels.
    for each in log.handlers:
        each.setLevel(min(each.level, log.level))
    log.info("logs from %s on", level)
