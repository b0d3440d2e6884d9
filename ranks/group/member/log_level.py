"""The level from which on this process logs what Lockstep says."""

import logging


def log_from(level: str) -> None:
    """Log from a level on, which is one of Python's in lower case."""
    log = logging.getLogger("lockstep")
    log.setLevel(level.upper())
    if not log.hasHandlers():
        # Python's own handler of last resort leaves out what is less than a warning.
        log.addHandler(logging.StreamHandler())
    # Those of vLLM, which Lockstep shares, have a level of their own; the root's are the application's.
    for each in log.handlers:
        each.setLevel(min(each.level, log.level))
    log.info("logs from %s on", level)
