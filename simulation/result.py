"""What a schedule did, and what it has found."""

from collections import Counter
from dataclasses import dataclass, field

from .checkers.findings.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must hold did not."""

    seed: int
    step: int
    finding: Finding
    replay: str
    """The command that shows it again."""


@dataclass(slots=True, kw_only=True)
class ScheduleResult:
    """What a schedule did."""

    seed: int
    l1: str
    """Who owned the device pages."""
    profile: str
    """The model's."""
    steps: int = 0
    rounds: int = 0
    """On each rank; the steps of draining are rounds too."""
    epochs: int = 0
    collectives_per_step_max: int = 0
    operations: Counter[str] = field(default_factory=Counter[str])
    """By kind."""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """By kind and outcome."""
    faults: Counter[str] = field(default_factory=Counter[str])
    coverage: Counter[str] = field(default_factory=Counter[str])
    """What the workload ran into."""
    fingerprint: int = 0
    """Of the whole run: equal for equal seeds, always."""
    transcript: list[str] = field(default_factory=list[str])
    """One line for each command and step, if asked for."""
    violation: Violation | None = None
