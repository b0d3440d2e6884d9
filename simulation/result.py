"""The result of one simulated schedule: counters, and a violation if there was one."""

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
    """The command that replays the schedule up to the violation."""


@dataclass(slots=True, kw_only=True)
class ScheduleResult:
    """Counters and outcome of one simulated schedule."""

    seed: int
    l1: str
    """The owner of the device pages (L1): `replica` or `engine`."""
    profile: str
    """The model profile."""
    pd: str = ""
    """TP sizes of producer and consumer, as in 2x1; empty for a single group."""
    steps: int = 0
    rounds: int = 0
    """Number of rounds that each rank took, including rounds while the group was drained."""
    epochs: int = 0
    collectives_per_step_max: int = 0
    operations: Counter[str] = field(default_factory=Counter[str])
    """Number of operations, by kind."""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """Number of ended operations, by kind and outcome."""
    faults: Counter[str] = field(default_factory=Counter[str])
    coverage: Counter[str] = field(default_factory=Counter[str])
    """Number of times that the simulated engine reached a situation, by name of the situation."""
    fingerprint: int = 0
    """A checksum over the replica's digests after all steps; equal seeds give equal checksums."""
    transcript: list[str] = field(default_factory=list[str])
    """One line per command and step, if recording was requested."""
    violation: Violation | None = None
