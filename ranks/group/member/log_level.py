"""The level from which on this process logs what Lockstep says."""

import logging
from typing import Final

LOGGERS: Final = ("lockstep", "vllm.lockstep", "sglang.lockstep")


def log_from(level: str) -> None:
    """Log from a level on, which is one of Python's in lower case."""
    for log in map(logging.getLogger, LOGGERS):
        log.setLevel(level.upper())
        if not log.hasHandlers():
            # Python's own handler of last resort leaves out what is less than a warning.
            log.addHandler(logging.StreamHandler())
        # vLLM's handler has a level of its own; the root's handlers are the application's.
        for each in (*log.handlers, *logging.getLogger(log.name.partition(".")[0]).handlers):
            each.setLevel(min(each.level, log.level))
    logging.getLogger("lockstep").info("logs from %s on", level)
