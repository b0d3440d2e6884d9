"""What may move pages from group to group, and which transfer engine does. Pure."""

from dataclasses import dataclass
from typing import Final

from ...errors import ConfigError
from .host_port import split_address

TCP: Final = "tcp"
MOONCAKE: Final = "mooncake"
TRANSFERS: Final = (TCP, MOONCAKE)
"""What moves pages from group to group: the connection by which they are asked for, or an engine."""
PROTOCOLS: Final = ("tcp", "rdma")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Which engine is to move pages."""

    protocol: str = "tcp"
    device: str = ""
    """Which RDMA devices are used, by name and with commas between; empty for all."""
    insists: bool = False
    """Whether nothing is to be read where there is none, instead of over the connection."""


def require_engine_address(address: str) -> None:
    """Raise `ConfigError` for what is neither empty nor the address of an engine."""
    if not address:
        return
    protocol, _, place = address.partition("://")
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{address!r} is no engine; it begins with tcp:// or rdma://")
    split_address(place)
