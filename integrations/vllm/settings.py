"""What a user may write into `kv_connector_extra_config`, checked once, when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from ...coordinator.settings import Settings
from ...errors import ConfigError
from ...ranks.protocol.config import TtlSeconds
from ...ranks.protocol.outside import Peers
from ..settings import ServingSettings
from .weights import InFlight, WeightsChange

WHERE = "kv_connector_extra_config"

SECRET_FILE = "secret_file"  # noqa: S105 - a name.
"""Stands for the secret of peers."""


@dataclass(frozen=True, kw_only=True)
class HandingOver(Settings):
    """Bounds on what engines do for each other; equal on every rank, in agreed time."""

    ttl_s: TtlSeconds = 60.0
    """For how long a request that has ended here is kept for the engine that goes on with it."""
    patience_s: TtlSeconds = 5.0
    """How long a request waits for what the engine that has computed it has promised."""


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings(ServingSettings):
    """The extra configuration of a connector; equal on every rank."""

    where: ClassVar[str] = WHERE

    weights_change: WeightsChange = WeightsChange.WITH_RESET
    """Whether the weights may be others after each reset, or only once they are named."""
    in_flight: InFlight = InFlight.KEEP
    """What becomes of loads that are under way when the weights change."""
    peers: Peers | None = None
    """How this rank and those of other engines read each other's host memory; see `ranks.outside`."""
    handing_over: HandingOver = HandingOver()
    """For how long engines that share a request's work wait for each other: ttl_s, patience_s."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_host_memory()


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    peers = extra.get("peers")
    if isinstance(peers, Mapping) and SECRET_FILE in peers:
        extra = {**extra, "peers": _with_secret(cast("Mapping[str, Any]", peers))}
    return ConnectorSettings.read(extra)


def _with_secret(peers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of peers with the secret that a file has, which no log shows."""
    if "secret" in peers:
        raise ConfigError(f"{WHERE}: peers: give secret or {SECRET_FILE}, and not both")
    path = peers[SECRET_FILE]
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{WHERE}: peers.{SECRET_FILE} is {path!r}, which cannot be read: {error}"
        ) from error
    if not secret:
        raise ConfigError(f"{WHERE}: peers.{SECRET_FILE} is {path!r}, which is empty")
    return {key: each for key, each in peers.items() if key != SECRET_FILE} | {"secret": secret}
