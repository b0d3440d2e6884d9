"""The basis of a replica: the settings, clocks, journal and outbox that most of its parts share."""

from dataclasses import dataclass, field

from .clock import Clock
from .effects import Outbox
from .journal import Journal
from .settings import ReplicaConfig


@dataclass(frozen=True, slots=True)
class Basis:
    """One for each replica: its parts change what is in it, and none replaces it."""

    config: ReplicaConfig
    clock: Clock = field(default_factory=Clock)
    journal: Journal = field(default_factory=Journal)
    outbox: Outbox = field(default_factory=Outbox)
