"""Exploring schedules from the command line: a report, a summary, and a status."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..simulation.explore import explore, print_report
from .first_error import EXIT_FAULT
from .report import write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """Which schedules to explore."""

    seeds: range
    ranks: int
    steps: int
    profile: str
    depth: int | None
    """None takes both depths in turn, by the seed."""
    l1: str
    """Who owns the device pages: replica, engine, or both in turn, by the seed."""


def parse_seeds(text: str) -> range:
    """Return the seeds that `A:B` stands for: from A up to B - 1."""
    first, separator, last = text.partition(":")
    if not (separator and _is_number(first) and _is_number(last)):
        raise ConfigError(f"--seeds is {text!r}, must be A:B with whole numbers, for example 0:100")
    if int(first) >= int(last):
        raise ConfigError(f"--seeds is {text!r}, must be A:B with A less than B")
    return range(int(first), int(last))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def run_simulation(exploration: Exploration, report: Path | None) -> int:
    """Explore, print what came out, write the report, and return the status to exit with."""
    try:
        found = explore(
            exploration.seeds,
            ranks=exploration.ranks,
            steps=exploration.steps,
            profile=exploration.profile,
            depth=exploration.depth,
            l1=exploration.l1,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if report is not None:
        write_report(str(report), found)
    print_report(found)
    return EXIT_FAULT if found["violations"] else 0
