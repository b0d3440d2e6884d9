"""The basis of a replica: the settings, clocks, journal, outbox and memory of misses of its parts."""

from dataclasses import dataclass, field

from ...protocol.effects import Outbox
from ...protocol.replica_config import ReplicaConfig
from .journal import Journal
from .misses import Misses


@dataclass(slots=True)
class Clock:
    """A logical clock, which orders uses, and agreed time, in which deadlines are counted.

    Neither is this rank's own.
    """

    uses: int = 0
    """Logical time: one more for each command that uses pages."""
    agreed_ms: int = 0
    """Agreed time; 0 while none has been agreed on."""

    def tick(self) -> None:
        """Advance the logical clock."""
        self.uses += 1


@dataclass(frozen=True, slots=True)
class Basis:
    """One for each replica: its parts change what is in it, and none replaces it."""

    config: ReplicaConfig
    clock: Clock = field(default_factory=Clock)
    journal: Journal = field(default_factory=Journal)
    outbox: Outbox = field(default_factory=Outbox)
    misses: Misses = field(default_factory=Misses)
