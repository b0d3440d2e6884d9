"""What the measurement of exchanges measures."""

from dataclasses import dataclass

from ..coordinator.collective import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """One group of processes, and what it exchanges."""

    ranks: int
    transport: Transport
    hosts: int = 1
    """Pretended ones, for the transport `hierarchical`; each has as many ranks."""
    lanes: tuple[int, ...]
    """The lengths of the vectors, one after the other."""
    rounds: int = 200
    cores: int | None = None
    """How many cores all ranks share; None for all that this process may use."""
    doubling: bool = False
    """Measure `exchange_rank.Doubling` in the place of the transport."""
