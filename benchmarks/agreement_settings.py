"""What the benchmark of agreement measures, checked when it is made."""

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
    """Says what is measured: the options of `lockstep bench agreement`."""

    ranks: Ranks = 2
    """Ranks, one process each."""
    operations: Annotated[int, Parameter(validator=Number(gte=0, lte=1 << 16))] = 32
    """Prefetches in flight, each with a place in the ballot."""
    transport: Transport = Transport.AUTO
    """The transport of the rounds; auto picks one by the hosts."""
    work_us: Annotated[int, Parameter(validator=Number(gte=0, lte=10_000_000))] = 5000
    """Microseconds that the caller computes between pipelined steps."""
    hosts: Annotated[int, Parameter(validator=Number(gte=1))] = 1
    """Pretend that the ranks are on so many hosts: what goes between those goes over gloo."""
    blocks: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 10
    """How often everything is measured in turns."""

    def __post_init__(self) -> None:
        if self.hosts > self.ranks:
            raise ConfigError(f"--hosts is {self.hosts}, must be at most --ranks, {self.ranks}")
