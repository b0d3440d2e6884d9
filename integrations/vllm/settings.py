"""What a user may write into `kv_connector_extra_config`, checked once, when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import ConfigError
from ...storage_backends.registry import is_built_in, known_schemes, make_backend
from ...storage_backends.uri import RANK, parse_uri
from ..settings import PluginSettings, one_of, read
from .weights import InFlight, WeightsChange

WHERE = "kv_connector_extra_config"

_OWN: Mapping[str, type[WeightsChange | InFlight]] = {
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


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    values = read(WHERE, extra, _OWN)
    for key, choices in _OWN.items():
        if key in values:
            values[key] = one_of(f"{WHERE}: {key}", choices, values[key])
    settings = ConnectorSettings(**values)
    settings.require_host_memory()
    if settings.store is not None:
        _require_store(settings.store)
    return settings


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
