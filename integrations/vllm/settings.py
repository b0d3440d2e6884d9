"""What a user may write into `kv_connector_extra_config`, checked once, when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar, cast

from ...coordinator.collective import Transport
from ...coordinator.stop_policy import StopPolicy, StopRule
from ...errors import ConfigError
from ...ranks.config import Bounds, Timeouts

WHERE = "kv_connector_extra_config"

ROUND_S = 600.0
"""What one rank's program does before it comes back to its engine may take minutes: a checkpoint that
it writes, weights that it loads. A rank that has died is noticed at once, whatever this is."""

Section = StopPolicy | Bounds | Timeouts

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """The extra configuration of a connector; equal on every rank."""

    host_memory_gib: float | None = None
    """Host memory for pages on each rank, in GiB."""
    host_pages: int | None = None
    """The host memory as a number of pages (blocks of vLLM's); exactly one of the two is given."""
    store: str | None = None
    """The URI of a store; None for host memory alone."""
    model: str | None = None
    """The model's name in keys; by default the one that the engine was given, which may be a path."""
    weights_version: str | None = None
    """Stands for all weights in keys; if it is given, the files that hold them are not read."""
    adapter_versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """What stands in keys for an adapter's weights, by its name, in the place of its files."""
    weight_digests: str | None = None
    """The folder in which digests of files of weights are remembered; by default the engine's cache."""
    pipeline_depth: int = 1
    """1: a round's verdict is applied one step later, hidden behind a forward pass. 0: at once."""
    transport: Transport = Transport.AUTO
    """What carries the rounds: `auto` picks by the hosts of the ranks."""
    idle_wait_s: float = 0.002
    """How long a step without anything to compute waits for storage and copies."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    """When a request stops waiting for storage: rule, base_s, per_ki_token_s, cap_s."""
    bounds: Bounds = field(default_factory=Bounds)
    """See `ranks.config.Bounds`."""
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(round_s=ROUND_S))
    """See `ranks.config.Timeouts`."""

    def pages(self, page_bytes: int) -> int:
        """Return the number of host pages for pages of `page_bytes` bytes on this rank."""
        if self.host_pages is not None:
            return self.host_pages
        assert self.host_memory_gib is not None
        pages = int(self.host_memory_gib * (1 << 30)) // page_bytes
        if not pages:
            raise ConfigError(
                f"{WHERE}: host_memory_gib is {self.host_memory_gib:g}, and one page of this model"
                f" takes {page_bytes} bytes; give more"
            )
        return pages


def parse(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    sections = {"stop_policy": StopPolicy, "bounds": Bounds, "timeouts": Timeouts}
    known = {each.name for each in fields(ConnectorSettings)}
    _require_known(WHERE, extra, known)
    values: dict[str, Any] = {}
    for key, value in extra.items():
        where = f"{WHERE}: {key}"
        if key in sections:
            values[key] = _section(where, sections[key], value)
        elif key == "adapter_versions":
            given = _mapping(where, value)
            values[key] = {name: _text(f"{where}.{name}", each) for name, each in given.items()}
        elif key in {"store", "model", "weights_version", "weight_digests"}:
            values[key] = _text(where, value)
        elif key == "transport":
            values[key] = _one_of(f"{WHERE}: {key}", Transport, value)
        elif key in {"host_memory_gib", "idle_wait_s"}:
            values[key] = _number(where, value)
        else:
            values[key] = _integer(where, value)
    settings = ConnectorSettings(**values)
    _check(settings)
    return settings


def _check(settings: ConnectorSettings) -> None:
    if (settings.host_memory_gib is None) == (settings.host_pages is None):
        raise ConfigError(
            f"{WHERE}: give host_memory_gib, the host memory for pages on each rank in GiB, or"
            " host_pages, and not both"
        )
    if settings.host_pages is not None and settings.host_pages < 1:
        raise ConfigError(f"{WHERE}: host_pages is {settings.host_pages}, must be 1 or more")
    if settings.host_memory_gib is not None and not 0 < settings.host_memory_gib < 1 << 20:
        raise ConfigError(
            f"{WHERE}: host_memory_gib is {settings.host_memory_gib}, must be more than 0"
        )
    if settings.pipeline_depth not in (0, 1):
        raise ConfigError(f"{WHERE}: pipeline_depth is {settings.pipeline_depth}, must be 0 or 1")
    if not 0 < settings.idle_wait_s <= 1:
        raise ConfigError(
            f"{WHERE}: idle_wait_s is {settings.idle_wait_s}, must be more than 0 and at most 1"
        )


def _section(where: str, kind: type[Section], value: object) -> Section:
    given = _mapping(where, value)
    _require_known(where, given, {each.name for each in fields(kind)})
    values: dict[str, Any] = {"round_s": ROUND_S} if kind is Timeouts else {}
    for key, each in given.items():
        if key == "rule":
            values[key] = _one_of(f"{where}.{key}", StopRule, each)
        elif kind is Bounds:
            values[key] = _integer(f"{where}.{key}", each)
        else:
            values[key] = _number(f"{where}.{key}", each)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold keys and values, not {value!r}")
    return cast("Mapping[str, Any]", value)


def _require_known(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{where}: there is no key {key!r}; known: {', '.join(sorted(known))}"
            )


def _one_of(where: str, choices: type[Choice], value: object) -> Choice:
    try:
        return choices(cast(str, value))
    except ValueError:
        raise ConfigError(f"{where} is {value!r}; known: {', '.join(choices)}") from None


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be text, not {value!r}")
    return value


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} must be a number, not {value!r}")
    return float(value)


def _integer(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be an integer, not {value!r}")
    return value
