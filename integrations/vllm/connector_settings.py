"""The user's settings in `kv_connector_extra_config`, checked once, at engine start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from ...coordinator.validated_settings import Settings
from ...errors import ConfigError
from ...ranks.protocol.config import TtlSeconds
from ...ranks.protocol.network_config import Peers
from ..plugin_settings import ServingSettings
from .weights import InFlight, WeightsChange

WHERE = "kv_connector_extra_config"

SECRET_FILE = "secret_file"  # noqa: S105 - a name.
"""Key of the extra configuration, used instead of `secret`: the path of a file with the peers' secret.
"""


@dataclass(frozen=True, kw_only=True)
class HandingOver(Settings):
    """Time limits of handoffs from prefill to decode engines; equal on every rank, in agreed time."""

    ttl_s: TtlSeconds = 60.0
    """Seconds of agreed time that a finished request's pages are served to the decode engine."""
    patience_s: TtlSeconds = 5.0
    """Seconds of agreed time that a request waits for pages that the prefill engine has promised."""


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings(ServingSettings):
    """The settings in the connector's extra configuration; equal on every rank."""

    where: ClassVar[str] = WHERE

    weights_change: WeightsChange = WeightsChange.WITH_RESET
    """Which calls to vLLM may change the weights: only calls that set a new name, or also resets."""
    in_flight: InFlight = InFlight.KEEP
    """Treatment of a load in flight when the weights change: it is kept, or it counts as failed."""
    peers: Peers | None = None
    """Settings with which engines read each other's host memory; see `network_config`."""
    handing_over: HandingOver = HandingOver()
    """Time limits of handoffs between a prefill and a decode engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_host_memory()


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; raise `ConfigError` with the invalid key and its valid values."""
    peers = extra.get("peers")
    if isinstance(peers, Mapping) and SECRET_FILE in peers:
        extra = {**extra, "peers": _with_secret(cast("Mapping[str, Any]", peers))}
    return ConnectorSettings.read(extra)


def _with_secret(peers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the peers' settings with the secret from the secret file; the secret is never logged."""
    if "secret" in peers:
        raise ConfigError(f"{WHERE}: peers: give secret or {SECRET_FILE}, but not both")
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
