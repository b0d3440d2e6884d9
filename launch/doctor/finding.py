"""What an examination says: one finding for each thing that was looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How something was found."""

    OK = "ok"
    ADVICE = "advice"
    """It works, and may be slow, or be in the way of something that not everybody needs."""
    PROBLEM = "problem"
    """Something that ranks need does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    seen: str
    """What was found, as a sentence without an end."""
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def well(name: str, seen: str) -> Finding:
    """Return the finding that something is as it should be."""
    return Finding(name, Status.OK, seen)


def advice(name: str, seen: str, remedy: str) -> Finding:
    """Return the finding that something could be better."""
    return Finding(name, Status.ADVICE, seen, remedy)


def problem(name: str, seen: str, remedy: str) -> Finding:
    """Return the finding that something does not work."""
    return Finding(name, Status.PROBLEM, seen, remedy)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return the status to exit with: 1 where there is a problem, 0 otherwise."""
    return int(any(each.status is Status.PROBLEM for each in findings))
