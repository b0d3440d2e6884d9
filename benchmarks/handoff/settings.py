"""What the benchmark of handoffs measures, checked when it is made, and what a turn of it took."""

from dataclasses import dataclass
from typing import Annotated, get_args

from cyclopts import Parameter
from cyclopts.validators import Number

from ...errors import ConfigError
from ...page_format.object_shape import PART_BYTES_MAX
from ...ranks.protocol.engine_settings import MOONCAKE, TCP, EngineSettings, Transfer
from ..bare_calls import require_memory_twice
from ..byte_sizes import BYTES


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """Says what is measured: the options of `lockstep bench handoff`."""

    page_bytes: Annotated[int, BYTES, Parameter(validator=Number(gte=1, lte=PART_BYTES_MAX))]
    """Bytes of a page, such as 262144 or 1MiB."""
    total_bytes: Annotated[
        int, BYTES, Parameter("--bytes", validator=Number(lte=1 << 50), show_default="256MiB")
    ] = 256 << 20
    """Bytes of all pages of a round."""
    rounds: Annotated[int, Parameter(validator=Number(gte=1, lte=1000))] = 9
    """How often everything is measured in turns."""
    transfer: Annotated[str, Parameter(choices=get_args(Transfer))] = TCP
    """The transfer from host memory to host memory: tcp, or mooncake for Mooncake's transfer
    engine, over TCP as well."""

    def __post_init__(self) -> None:
        if self.total_bytes < self.page_bytes:
            raise ConfigError(f"--bytes is {self.total_bytes}, must be {self.page_bytes} or more")
        require_memory_twice(self.total_bytes)

    @property
    def pages(self) -> int:
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
