"""Findings of `lockstep doctor`, one for each check."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    ADVICE = "advice"
    """Severity: the checked resource works, but is slow or does not suffice for an optional feature."""
    PROBLEM = "problem"
    """Severity: the checked resource does not work, and ranks need it."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    status: Status
    seen: str
    """The observed state, as a sentence without a full stop."""
    remedy: str = ""
    """The remedy; empty if nothing needs to be done."""


def well(name: str, seen: str) -> CheckResult:
    """Return a finding that says that the checked resource works."""
    return CheckResult(name, Status.OK, seen)


def advice(name: str, seen: str, remedy: str) -> CheckResult:
    """Return a finding that recommends an improvement; ranks work without it."""
    return CheckResult(name, Status.ADVICE, seen, remedy)


def problem(name: str, seen: str, remedy: str) -> CheckResult:
    """Return a finding about a resource that ranks need and that does not work."""
    return CheckResult(name, Status.PROBLEM, seen, remedy)


def exit_status(findings: Sequence[CheckResult]) -> int:
    """Return the exit status of the command: 1 if a finding is a problem, otherwise 0."""
    return int(any(each.status is Status.PROBLEM for each in findings))
