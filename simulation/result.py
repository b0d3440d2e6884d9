"""What a schedule has done, and what it has found."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must hold did not, at one step of a schedule."""

    seed: int
    step: int
    finding: str
    """One sentence that says what was found."""
    replay: str
    """The command that shows it again."""


@dataclass(slots=True, kw_only=True)
class ScheduleResult:
    """What a schedule has done."""

    seed: int
    l1: str
    """The owner of the device pages."""
    profile: str
    """The profile of the model."""
    pd: str = ""
    """The TP sizes of producer and consumer; empty for a group alone."""
    steps: int = 0
    rounds: int = 0
    """How many rounds each rank has taken, those of draining among them."""
    epochs: int = 0
    collectives_per_step_max: int = 0
    operations: Counter[str] = field(default_factory=Counter[str])
    """How many operations there were, by kind."""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """How many operations have ended how, by kind and outcome."""
    faults: Counter[str] = field(default_factory=Counter[str])
    coverage: Counter[str] = field(default_factory=Counter[str])
    """How often the workload has met what, by its name."""
    fingerprint: int = 0
    """A checksum of the whole run; equal seeds always give equal ones."""
    transcript: list[str] = field(default_factory=list[str])
    """One line for each command and step, if that was asked for."""
    violation: Violation | None = None
