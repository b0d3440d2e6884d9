"""Settings for who reaches a group from outside: other groups read its pages, and an operator asks."""

from dataclasses import dataclass, field

from ...errors import ConfigError
from .allowed_sources import AllowedSources
from .engine_settings import PROTOCOLS, TCP, TRANSFERS, EngineSettings
from .host_port import require_long_enough, split_address, split_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
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
    transfer: str = TCP
    """What moves pages: `tcp`, the connection by which they are asked for; or `mooncake`, Mooncake's
    transfer engine, between groups that both have it. It gives host memory to whoever reaches the ports
    at which it listens on every interface, to read and to write, without a secret."""
    protocol: str = "tcp"
    """How the transfer engine moves them: `tcp` or `rdma`."""
    device: str = ""
    """The RDMA devices that it uses, by name and with commas between; empty for all. It may differ
    between ranks."""
    insists: bool = False
    """Whether a missing transfer engine, here or there, is an error; otherwise a line in the log says
    so, and pages come over the connection."""

    def __post_init__(self) -> None:
        split_address(self.address)
        if self.reached_at:
            split_host(self.reached_at)
        AllowedSources(self.allow_sources)
        require_long_enough("peers", self.secret.encode())
        for name, choices in (("transfer", TRANSFERS), ("protocol", PROTOCOLS)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} of peers is {getattr(self, name)!r}, must be one of {', '.join(choices)}"
                )
        if self.transfer == TCP and (self.protocol, self.device, self.insists) != (
            "tcp",
            "",
            False,
        ):
            raise ConfigError("protocol, device and insists of peers need transfer='mooncake'")

    def excludes(self, source: str) -> bool:
        """Say whether `allow_sources` excludes a `peer://` URI, as far as that shows without DNS."""
        address = source.removeprefix("peer://").partition("?")[0].partition("/")[0]
        host, _ = split_address(address)
        return AllowedSources(self.allow_sources).excludes(host)

    @property
    def engine(self) -> EngineSettings | None:
        """Which transfer engine moves pages; None for the connection."""
        if self.transfer == TCP:
            return None
        return EngineSettings(protocol=self.protocol, device=self.device, insists=self.insists)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Where an operator asks a group for something while it serves (`lockstep ctl`)."""

    path: str
    """The Unix socket that rank 0 makes, for its own user alone. A folder that is missing is made, for
    that user alone as well."""
    refused: tuple[str, ...] = ()
    """The requests that this engine does not take, since it decides on that itself."""

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path:
            raise ConfigError("control needs the path of a socket")
