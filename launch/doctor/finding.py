"""Findings of `lockstep doctor`, one for each check."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    ADVICE = "advice"
    """Works, but may be slow or prevent an optional feature."""
    PROBLEM = "problem"
    """Ranks need this, and it does not work."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    status: Status
    seen: str
    """The observation, as a sentence without a full stop."""
    remedy: str = ""
    """The remedy; empty if nothing needs to be done."""


def well(name: str, seen: str) -> CheckResult:
    """Return a finding without a fault."""
    return CheckResult(name, Status.OK, seen)


def advice(name: str, seen: str, remedy: str) -> CheckResult:
    """Return a finding of something that could be better."""
    return CheckResult(name, Status.ADVICE, seen, remedy)


def problem(name: str, seen: str, remedy: str) -> CheckResult:
    """Return a finding of something that does not work."""
    return CheckResult(name, Status.PROBLEM, seen, remedy)


def exit_status(findings: Sequence[CheckResult]) -> int:
    """Return the exit status: 1 if there is a problem, otherwise 0."""
    return int(any(each.status is Status.PROBLEM for each in findings))
