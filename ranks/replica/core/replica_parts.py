"""State shared by all parts of a replica: settings, clocks, journal, outgoing effects, misses."""

from dataclasses import dataclass, field

from ...protocol.effects import Outbox
from ...protocol.replica_config import ReplicaConfig
from .journal import Journal
from .misses import Misses


@dataclass(slots=True)
class Clock:
    """Two replicated clocks: logical time orders the uses of pages, and agreed time measures deadlines.

    Neither clock reads the rank's wall clock.
    """

    uses: int = 0
    """Logical time: increases by one with each command that uses pages."""
    agreed_ms: int = 0
    """Time agreed on by all ranks, in ms; 0 before the first agreement."""

    def tick(self) -> None:
        """Advance the logical clock."""
        self.uses += 1


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """State shared by all parts of one replica. Its fields are mutated and never replaced."""

    config: ReplicaConfig
    clock: Clock = field(default_factory=Clock)
    journal: Journal = field(default_factory=Journal)
    outbox: Outbox = field(default_factory=Outbox)
    misses: Misses = field(default_factory=Misses)
