"""Network settings of a group: page sharing with other groups, and the operator's control socket."""

from dataclasses import dataclass, field

from ...coordinator.validated_settings import Settings, Text
from ...errors import ConfigError
from .allowed_sources import AllowedSources
from .host_port import ip_of, is_ip, require_long_enough, split_address, split_host
from .transfer_engine_settings import TransferSettings


@dataclass(frozen=True, kw_only=True)
class Peers(TransferSettings):
    """Settings for reading host pages from ranks of other groups, and for serving host pages to them.

    A rank of another group is named by a `peer://` URI.
    """

    address: str = "127.0.0.1:0"
    """The address host:port at which this rank serves its pages. Port 0 selects a free port. May differ
    between ranks."""
    reached_at: str = ""
    """The host, or host:port, at which other groups reach this rank; empty if they use `address`. May
    differ between ranks. With a secret, this rank accepts a reader only if the reader authenticates for
    `reached_at`, or for this rank's address at which the reader's connection arrived."""
    secret: str = field(default="", repr=False)
    """Secret shared by all groups that read from each other, 16 bytes or more. Required if other hosts
    can reach the address."""
    allow_sources: tuple[str, ...] = ()
    """Networks (`10.0.0.0/8`), addresses and host names of the groups that requests may name as
    sources. Empty allows every group that proves it has the secret."""

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
        """Return whether `allow_sources` excludes a `peer://` URI, judged without a DNS lookup.

        Returns False if the decision depends on the host's address, which is not known yet.
        """
        address = source.removeprefix("peer://").partition("?")[0].partition("/")[0]
        host, _ = split_address(address)
        return AllowedSources(self.allow_sources).excludes(host)


@dataclass(frozen=True, kw_only=True)
class Control(Settings):
    """Settings of the socket through which an operator controls a running group (`lockstep ctl`)."""

    path: Text
    """Path of the Unix socket that rank 0 creates. The socket, and its folder if missing, are
    accessible to rank 0's user only."""
    refused: tuple[str, ...] = ()
    """Kinds of control requests that the group refuses, because only the engine may decide on them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "\0" in self.path:
            raise ConfigError("the path of control has a NUL character; give a socket's path")
