"""The basis of a replica: the settings, clocks, journal and outbox that most of its parts share."""

from dataclasses import dataclass, field

from ...protocol.effects import Outbox
from ...protocol.replica_config import ReplicaConfig
from .clock import Clock
from .journal import Journal


@dataclass(frozen=True, slots=True)
class Basis:
    """One for each replica: its parts change what is in it, and none replaces it."""

    config: ReplicaConfig
    clock: Clock = field(default_factory=Clock)
    journal: Journal = field(default_factory=Journal)
    outbox: Outbox = field(default_factory=Outbox)
