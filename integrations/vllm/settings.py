"""What a user may write into `kv_connector_extra_config`, checked once, when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...errors import ConfigError
from ...ranks.protocol.outside import Peers
from ...storage_backends.registry import is_built_in, known_schemes, make_backend
from ...storage_backends.uri import RANK, parse_uri
from ..settings import PluginSettings, mapping, one_of, read, section, text
from .handing_over import HANDING_OVER, HandingOver
from .weights import InFlight, WeightsChange

WHERE = "kv_connector_extra_config"

SECRET_FILE = "secret_file"  # noqa: S105 - a name.
"""Stands for the secret of peers."""

_CHOICES: Mapping[str, type[WeightsChange | InFlight]] = {
    "weights_change": WeightsChange,
    "in_flight": InFlight,
}
"""What is known under vLLM alone, and what it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(PluginSettings):
    """The extra configuration of a connector; equal on every rank."""

    where: ClassVar[str] = WHERE

    weights_change: WeightsChange = WeightsChange.WITH_RESET
    """Whether the weights may be others after each reset, or only once they are named."""
    in_flight: InFlight = InFlight.KEEP
    """What becomes of loads that are under way when the weights change."""
    peers: Peers | None = None
    """How this rank and those of other engines read each other's host memory; see `ranks.outside`."""
    handing_over: HandingOver = HANDING_OVER
    """For how long engines that share a request's work wait for each other: ttl_s, patience_s."""


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    values = read(WHERE, extra, (*_CHOICES, "peers", "handing_over"))
    for key, choices in _CHOICES.items():
        if key in values:
            values[key] = one_of(f"{WHERE}: {key}", choices, values[key])
    if "peers" in values:
        where = f"{WHERE}: peers"
        values["peers"] = section(
            where, Peers, _with_secret(where, mapping(where, values["peers"]))
        )
    if "handing_over" in values:
        values["handing_over"] = section(
            f"{WHERE}: handing_over", HandingOver, values["handing_over"]
        )
    settings = ConnectorSettings(**values)
    settings.require_host_memory()
    if settings.store is not None:
        _require_store(settings.store)
    return settings


def _with_secret(where: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of peers with the secret that a file has, which no log shows."""
    if SECRET_FILE not in given:
        return given
    rest = {key: each for key, each in given.items() if key != SECRET_FILE}
    if "secret" in rest:
        raise ConfigError(f"{where}: give secret or {SECRET_FILE}, and not both")
    path = text(f"{where}.{SECRET_FILE}", given[SECRET_FILE])
    try:
        return rest | {"secret": Path(path).read_text(encoding="utf-8").strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}.{SECRET_FILE}: {path!r} cannot be read: {error}") from error


def _require_store(store: str) -> None:
    """Raise `ConfigError` for a URI that makes no sense, before anything is read or opened.

    That of another package's store is looked at when the store is opened.
    """
    try:
        scheme = parse_uri(store).scheme
        if is_built_in(scheme) or scheme not in known_schemes():
            make_backend(store.replace(RANK, "0"))
    except ConfigError as error:
        raise ConfigError(f"{WHERE}: {error}") from error
