"""Settings for moving pages between groups: TCP connection or transfer engine. Pure."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from ...coordinator.validated_settings import Settings, part_of
from ...errors import ConfigError
from .host_port import split_address

Transfer = Literal["tcp", "mooncake"]
"""How pages move between groups: over the TCP connection that carries the request for pages, or by a
transfer engine."""
TCP: Final = "tcp"
MOONCAKE: Final = "mooncake"
Protocol = Literal["tcp", "rdma"]


@dataclass(frozen=True, kw_only=True)
class TransferEngineSettings(Settings):
    """Settings of the transfer engine that moves pages."""

    protocol: Protocol = "tcp"
    device: str = ""
    """Names of the RDMA devices to use, separated by commas; empty for all. May differ between
    ranks."""
    insists: bool = False
    """Whether a missing transfer engine, on the reader's side or the server's, is an error. If false,
    it causes a warning, and pages move over the TCP connection."""


@dataclass(frozen=True, kw_only=True)
class TransferSettings(TransferEngineSettings):
    """How pages move between groups, and the settings of the transfer engine if one is used."""

    transfer: Transfer = TCP
    """`tcp` to move pages over TCP, or `mooncake` for Mooncake's transfer engine if both groups have
    it. The transfer engine listens on every interface and needs no secret: any process that reaches its
    ports can read and write host memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine is None and part_of(self, TransferEngineSettings) != vars(
            TransferEngineSettings()
        ):
            raise ConfigError("protocol, device and insists need transfer=mooncake")

    @property
    def engine(self) -> TransferEngineSettings | None:
        """The settings of the transfer engine that moves pages; None if pages move over TCP."""
        if self.transfer == TCP:
            return None
        return TransferEngineSettings(**part_of(self, TransferEngineSettings))


def require_engine_address(address: str) -> None:
    """Raise `ConfigError` if `address` is neither empty nor the address of a transfer engine."""
    if not address:
        return
    protocol, _, place = address.partition("://")
    if protocol not in get_args(Protocol):
        raise ConfigError(f"{address!r} is not a transfer engine; use tcp:// or rdma://")
    split_address(place)
