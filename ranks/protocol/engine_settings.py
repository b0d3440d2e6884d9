"""What may move pages from group to group, and which transfer engine does. Pure."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from ...coordinator.settings import Settings, part_of
from ...errors import ConfigError
from .host_port import split_address

Transfer = Literal["tcp", "mooncake"]
"""What moves pages from group to group: the connection by which they are asked for, or an engine."""
TCP: Final = "tcp"
MOONCAKE: Final = "mooncake"
Protocol = Literal["tcp", "rdma"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """Which engine is to move pages."""

    protocol: Protocol = "tcp"
    """How the transfer engine moves them."""
    device: str = ""
    """The RDMA devices that it uses, by name and with commas between; empty for all. It may differ
    between ranks."""
    insists: bool = False
    """Whether a missing transfer engine, here or there, is an error; otherwise a line in the log says
    so, and pages come over the connection."""


@dataclass(frozen=True, kw_only=True)
class TransferSettings(EngineSettings):
    """What is to move pages, the connection or an engine, and which engine."""

    transfer: Transfer = TCP
    """`tcp`, the connection; or `mooncake`, Mooncake's transfer engine, between groups that both have
    it. It gives host memory to whoever reaches the ports at which it listens on every interface, to
    read and to write, without a secret."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine is None and part_of(self, EngineSettings) != vars(EngineSettings()):
            raise ConfigError("protocol, device and insists need transfer=mooncake")

    @property
    def engine(self) -> EngineSettings | None:
        """Which transfer engine moves pages; None for the connection."""
        if self.transfer == TCP:
            return None
        return EngineSettings(**part_of(self, EngineSettings))


def require_engine_address(address: str) -> None:
    """Raise `ConfigError` for what is neither empty nor the address of an engine."""
    if not address:
        return
    protocol, _, place = address.partition("://")
    if protocol not in get_args(Protocol):
        raise ConfigError(f"{address!r} is no engine; it begins with tcp:// or rdma://")
    split_address(place)
