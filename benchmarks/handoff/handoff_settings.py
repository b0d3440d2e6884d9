"""Settings of the handoff benchmark, checked on construction, and the types of its timings."""

from dataclasses import dataclass
from typing import Annotated, get_args

from cyclopts import Parameter
from cyclopts.validators import Number

from ...errors import ConfigError
from ...page_format.object_shape import PART_BYTES_MAX
from ...ranks.protocol.transfer_engine_settings import (
    MOONCAKE,
    TCP,
    Transfer,
    TransferEngineSettings,
)
from ..bare_calls import require_memory_twice
from ..byte_sizes import BYTES


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """The options of `lockstep bench handoff`."""

    page_bytes: Annotated[int, BYTES, Parameter(validator=Number(gte=1, lte=PART_BYTES_MAX))]
    """Bytes per KV page, such as 262144 or 1MiB."""
    total_bytes: Annotated[
        int, BYTES, Parameter("--bytes", validator=Number(lte=1 << 50), show_default="256MiB")
    ] = 256 << 20
    """Total bytes of pages to move in a round."""
    rounds: Annotated[int, Parameter(validator=Number(gte=1, lte=1000))] = 9
    """The number of rounds; each round makes each measurement once."""
    transfer: Annotated[str, Parameter(choices=get_args(Transfer))] = TCP
    """How pages are transferred: `tcp` over a TCP connection; `mooncake` by Mooncake's transfer engine,
    which also uses TCP."""

    def __post_init__(self) -> None:
        if self.total_bytes < self.page_bytes:
            raise ConfigError(f"--bytes is {self.total_bytes}, must be {self.page_bytes} or more")
        require_memory_twice(self.total_bytes)

    @property
    def pages(self) -> int:
        return self.total_bytes // self.page_bytes

    @property
    def authenticates(self) -> bool:
        """Whether to measure authenticated frames, too; only the plain TCP connection uses frames."""
        return self.transfer == TCP

    @property
    def engine(self) -> TransferEngineSettings | None:
        """The settings of the transfer engine that moves pages; None for the plain TCP connection."""
        return TransferEngineSettings(insists=True) if self.transfer == MOONCAKE else None


@dataclass(frozen=True, slots=True)
class Turn:
    """Wall-clock seconds and CPU seconds of one process in one transfer of all pages.

    The serving process measures only its CPU seconds; its `wall` is 0.
    """

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """The durations of all transfers as seen by one process, by kind of transfer."""

    handoff: list[Turn]
    authenticated: list[Turn]
    limit: list[Turn]
