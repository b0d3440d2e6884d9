"""What the benchmark of handoffs measures, checked when it is made, and what a turn of it took."""

from dataclasses import dataclass

from ...errors import ConfigError
from ...page_format.object_shape import PART_BYTES_MAX
from ...ranks.protocol.engine_settings import MOONCAKE, TCP, TRANSFERS, EngineSettings
from ..bare_calls import require_memory_twice

ROUNDS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """Says what is measured."""

    page_bytes: int
    total_bytes: int = 256 << 20
    rounds: int = 9
    transfer: str = TCP
    """What moves the pages: the connection by which they are asked for, or a transfer engine."""

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--page-bytes", self.page_bytes, 1, PART_BYTES_MAX),
            ("--bytes", self.total_bytes, self.page_bytes, 1 << 50),
            ("--rounds", self.rounds, 1, ROUNDS_MAX),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{option} is {value}, must be {least} to {most}")
        if self.transfer not in TRANSFERS:
            raise ConfigError(
                f"--transfer is {self.transfer!r}, must be one of: {', '.join(TRANSFERS)}"
            )
        require_memory_twice(self.total_bytes)

    @property
    def pages(self) -> int:
        """The number of pages of one round."""
        return self.total_bytes // self.page_bytes

    @property
    def authenticates(self) -> bool:
        """Whether it is measured with authenticated frames as well: an engine's reads have none."""
        return self.transfer == TCP

    @property
    def engine(self) -> EngineSettings | None:
        """The transfer engine that moves pages; None for the connection."""
        return EngineSettings(insists=True) if self.transfer == MOONCAKE else None


@dataclass(frozen=True, slots=True)
class Turn:
    """Says what one turn took of one process, in seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Says what all turns took of one process."""

    handoff: list[Turn]
    authenticated: list[Turn]
    limit: list[Turn]
