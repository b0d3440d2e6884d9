"""What the benchmark of agreement measures, checked when it is made."""

from dataclasses import dataclass

from ..coordinator.collective import Transport
from ..errors import ConfigError

RANKS_MAX = 256
OPERATIONS_MAX = 1 << 16
WORK_US_MAX = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementSettings:
    """Says what is measured."""

    ranks: int = 2
    operations: int = 32
    """Prefetches in flight, each with a place in the ballot."""
    transport: Transport = Transport.AUTO
    work_us: int = 5000
    """What the caller computes between two pipelined steps."""
    hosts: int = 1
    """Pretend that the ranks are on so many hosts: what goes between those goes over gloo."""
    blocks: int = 10
    """How often everything is measured in turns."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("ranks", 1, RANKS_MAX),
            ("operations", 0, OPERATIONS_MAX),
            ("work_us", 0, WORK_US_MAX),
            ("hosts", 1, self.ranks),
            ("blocks", 1, 10_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is {value}, must be {least} to {most}")
