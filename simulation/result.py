"""Counters and findings of a simulated schedule."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violated rule at one step of a schedule."""

    seed: int
    step: int
    finding: str
    """One sentence that describes the violation."""
    replay: str
    """The command that reproduces the violation."""


@dataclass(slots=True, kw_only=True)
class ScheduleResult:
    """Counters and the outcome of one schedule."""

    seed: int
    l1: str
    """The owner of the device pages."""
    profile: str
    """The model profile."""
    pd: str = ""
    """The TP sizes of producer and consumer; empty for a single group."""
    steps: int = 0
    rounds: int = 0
    """Rounds taken by each rank, including rounds of the drain."""
    epochs: int = 0
    collectives_per_step_max: int = 0
    operations: Counter[str] = field(default_factory=Counter[str])
    """Number of operations, by kind."""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """Number of ended operations, by kind and outcome."""
    faults: Counter[str] = field(default_factory=Counter[str])
    coverage: Counter[str] = field(default_factory=Counter[str])
    """How often the workload reached each named situation."""
    fingerprint: int = 0
    """A checksum of the whole run; equal seeds give equal checksums."""
    transcript: list[str] = field(default_factory=list[str])
    """One line per command and step, if recording was requested."""
    violation: Violation | None = None
