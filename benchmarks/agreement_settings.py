"""Settings of the agreement benchmark, checked on construction."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ..coordinator.transport import Transport
from ..errors import ConfigError

RANKS_MAX = 256
Ranks = Annotated[int, Parameter(validator=Number(gte=1, lte=RANKS_MAX))]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementSettings:
    """The options of `lockstep bench agreement`."""

    ranks: Ranks = 2
    """The number of ranks, one process each."""
    operations: Annotated[int, Parameter(validator=Number(gte=0, lte=1 << 16))] = 32
    """The number of prefetches in flight, each of which has lanes in every ballot."""
    transport: Transport = Transport.AUTO
    """The transport of the rounds. `auto` chooses shared memory or gloo, depending on the ranks' hosts.
    """
    work_us: Annotated[int, Parameter(validator=Number(gte=0, lte=10_000_000))] = 5000
    """Microseconds of computation between two pipelined steps."""
    hosts: Annotated[int, Parameter(validator=Number(gte=1))] = 1
    """The number of hosts to simulate; traffic between them uses gloo."""
    blocks: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 10
    """How often the whole set of measurements is repeated."""

    def __post_init__(self) -> None:
        if self.hosts > self.ranks:
            raise ConfigError(f"--hosts is {self.hosts}, must be at most --ranks, {self.ranks}")
