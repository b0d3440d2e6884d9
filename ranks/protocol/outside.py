"""Settings for who reaches a group from outside: other groups read its pages, and an operator asks."""

from dataclasses import dataclass, field

from ...coordinator.settings import Settings, Text
from ...errors import ConfigError
from .allowed_sources import AllowedSources
from .engine_settings import TransferSettings
from .host_port import ip_of, is_ip, require_long_enough, split_address, split_host


@dataclass(frozen=True, kw_only=True)
class Peers(TransferSettings):
    """How this rank and those of other groups read each other's host memory (`peer://`)."""

    address: str = "127.0.0.1:0"
    """Where this rank serves its pages, as host:port; port 0 stands for any that is free. It may differ
    between ranks."""
    reached_at: str = ""
    """The host by which readers reach it, if that is another one, with :port if the port is another one
    as well; it may differ between ranks. With a secret, a reader is admitted only if it means this
    address, or the one that its connection has reached."""
    secret: str = field(default="", repr=False)
    """What all groups that read from each other know, 16 bytes or more; needed where other hosts reach
    the address."""
    allow_sources: tuple[str, ...] = ()
    """The networks (`10.0.0.0/8`), addresses and names of hosts that requests and other groups may name
    for this rank to read from; empty for any that proves the secret."""

    def __post_init__(self) -> None:
        super().__post_init__()
        split_address(self.address)
        if self.reached_at:
            host, _ = split_host(self.reached_at)
            if is_ip(host) and ip_of(host).is_unspecified:
                raise ConfigError(
                    f"reached_at is {self.reached_at!r}, which nobody can connect to; write an address"
                    " or a name by which other hosts reach this one"
                )
        AllowedSources(self.allow_sources)
        require_long_enough("peers", self.secret)

    def excludes(self, source: str) -> bool:
        """Say whether `allow_sources` excludes a `peer://` URI, as far as that shows without DNS."""
        address = source.removeprefix("peer://").partition("?")[0].partition("/")[0]
        host, _ = split_address(address)
        return AllowedSources(self.allow_sources).excludes(host)


@dataclass(frozen=True, kw_only=True)
class Control(Settings):
    """Where an operator asks a group for something while it serves (`lockstep ctl`)."""

    path: Text
    """The Unix socket that rank 0 makes, for its own user alone. A folder that is missing is made, for
    that user alone as well."""
    refused: tuple[str, ...] = ()
    """The requests that this engine does not take, since it decides on that itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "\0" in self.path:
            raise ConfigError("control needs the path of a socket")
