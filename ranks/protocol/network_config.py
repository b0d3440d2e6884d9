"""Network settings of a group: page sharing with other groups, and the operator's control socket."""

from dataclasses import dataclass, field

from ...coordinator.validated_settings import Settings, Text
from ...errors import ConfigError
from .allowed_sources import AllowedSources
from .host_port import ip_of, is_ip, require_long_enough, split_address, split_host
from .transfer_engine_settings import TransferSettings


@dataclass(frozen=True, kw_only=True)
class Peers(TransferSettings):
    """How this rank and ranks of other groups read each other's host memory (`peer://`)."""

    address: str = "127.0.0.1:0"
    """The address host:port at which this rank serves its pages; port 0 selects a free one. May differ
    between ranks."""
    reached_at: str = ""
    """The host, or host:port, by which readers reach this rank, if it differs from `address`. May
    differ between ranks. With a secret, a reader is admitted only if it authenticates for this address
    or for the one that its connection reached."""
    secret: str = field(default="", repr=False)
    """Secret shared by all groups that read from each other, 16 bytes or more. Required if other hosts
    can reach the address."""
    allow_sources: tuple[str, ...] = ()
    """Networks (`10.0.0.0/8`), addresses and host names that requests and other groups may name as
    sources for this rank to read from; empty allows any source that proves the secret."""

    def __post_init__(self) -> None:
        super().__post_init__()
        split_address(self.address)
        if self.reached_at:
            host, _ = split_host(self.reached_at)
            if is_ip(host) and ip_of(host).is_unspecified:
                raise ConfigError(
                    f"reached_at is {self.reached_at!r}, which is no host to connect to; give an"
                    " address or a name by which other hosts reach this one"
                )
        AllowedSources(self.allow_sources)
        require_long_enough("peers", self.secret)

    def excludes(self, source: str) -> bool:
        """Return whether `allow_sources` certainly excludes a `peer://` URI, without a DNS lookup."""
        address = source.removeprefix("peer://").partition("?")[0].partition("/")[0]
        host, _ = split_address(address)
        return AllowedSources(self.allow_sources).excludes(host)


@dataclass(frozen=True, kw_only=True)
class Control(Settings):
    """The socket through which an operator controls a running group (`lockstep ctl`)."""

    path: Text
    """Path of the Unix socket that rank 0 creates. The socket, and its folder if missing, are
    accessible to rank 0's user only."""
    refused: tuple[str, ...] = ()
    """Control requests that are refused because the engine decides on them itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "\0" in self.path:
            raise ConfigError("the path of control has a NUL character; give a socket's path")
