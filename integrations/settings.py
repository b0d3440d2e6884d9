"""What a user may write into the configuration that an engine hands to a plug-in, checked key by key.

`where` names the place of a value as the user wrote it, and begins each message.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, cast

from ..coordinator.collective import Transport
from ..coordinator.stop_policy import StopPolicy, StopRule
from ..errors import ConfigError
from ..ranks.protocol.config import Bounds, Timeouts
from ..ranks.protocol.outside import Control
from ..telemetry.port import PORT_MAX
from .releases import UnsupportedEngine
from .sharing import Share

ROUND_S = 600.0
"""What one rank's program does before it comes back to its engine may take minutes: a checkpoint that
it writes, weights that it loads. A rank that has died is noticed at once, whatever this is."""

_SECTIONS: Mapping[str, type[StopPolicy | Bounds | Timeouts]] = {
    "stop_policy": StopPolicy,
    "bounds": Bounds,
    "timeouts": Timeouts,
}

_CHOICES: Mapping[str, type[StrEnum]] = {
    "transport": Transport,
    "share": Share,
    "unsupported_engine": UnsupportedEngine,
}

Choice = TypeVar("Choice", bound=StrEnum)
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What every engine's plug-in can be told; equal on every rank."""

    where: ClassVar[str] = "the plug-in's settings"
    """The place of these values, as users know it."""

    host_memory_gib: float | None = None
    """Host memory for pages on each rank, in GiB."""
    host_pages: int | None = None
    """The host memory as a number of full attention's pages; not beside `host_memory_gib`."""
    store: str | None = None
    """The URI of a store; None for host memory alone."""
    model: str | None = None
    """The model's name in keys; by default the one that the engine was given, which may be a path."""
    weights_version: str | None = None
    """Stands for all weights in keys; if it is given, the files that hold them are not read."""
    adapter_versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """What stands in keys for an adapter's weights, by its name, in the place of its files."""
    share: Share = Share.ALL
    """With whom pages are shared: `all` engines that compute the same, or those of one `engine`."""
    unsupported_engine: UnsupportedEngine = UnsupportedEngine.REFUSE
    """Policy for an engine of a release that the plug-in is not for: `refuse` it, or `try` it."""
    weight_digests: str | None = None
    """The folder in which digests of files of weights are remembered; by default the engine's cache."""
    pipeline_depth: int = 1
    """1: a round's verdict is applied one step later, hidden behind a forward pass. 0: at once."""
    transport: Transport = Transport.AUTO
    """What carries the rounds: `auto` picks by the hosts of the ranks."""
    idle_wait_s: float = 0.002
    """How long a step without anything to compute waits for storage and copies."""
    metrics_port: int | None = None
    """The port of rank 0's metrics on loopback, with each other rank's at its own number beyond it."""
    control: str | None = None
    """The Unix socket at which rank 0 takes requests of an operator, for its own user alone."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    """When a request stops waiting for storage: rule, base_s, per_ki_token_s, cap_s."""
    bounds: Bounds = field(default_factory=Bounds)
    """See `ranks.config.Bounds`."""
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(round_s=ROUND_S))
    """See `ranks.config.Timeouts`."""

    def require_host_memory(self) -> None:
        """Raise `ConfigError` where nobody has said how much host memory there is for pages."""
        if self.host_memory_gib is None and self.host_pages is None:
            raise ConfigError(
                f"{self.where}: give host_memory_gib, the host memory for pages on each rank in GiB, or"
                " host_pages"
            )

    def host_pages_of(self, page_bytes: int) -> int:
        """Return the number of host pages, if one of all pools together has `page_bytes` bytes."""
        if self.host_pages is not None:
            return self.host_pages
        assert self.host_memory_gib is not None
        pages = int(self.host_memory_gib * (1 << 30)) // page_bytes
        if not pages:
            raise ConfigError(
                f"{self.where}: host_memory_gib is {self.host_memory_gib:g}, and one page of this model"
                f" takes {page_bytes} bytes; give more"
            )
        return pages


def control_of(settings: PluginSettings) -> Control | None:
    """Return where an operator asks an engine's group, which knows itself what weights it has."""
    if settings.control is None:
        return None
    return Control(path=settings.control, refused=("weights",))


def read(where: str, extra: Mapping[str, Any], own: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of `PluginSettings` that are given, and as they are those called `own`.

    Raises `ConfigError` with the key that is wrong and what it may be.
    """
    require_known(where, extra, {each.name for each in fields(PluginSettings)} | set(own))
    values: dict[str, Any] = {
        key: _value(f"{where}: {key}", key, value, own) for key, value in extra.items()
    }
    _check(where, PluginSettings(**{key: values[key] for key in values if key not in own}))
    return values


def _value(where: str, key: str, value: object, own: Iterable[str]) -> object:
    if key in own:
        return value
    if key in _SECTIONS:
        return section(where, _SECTIONS[key], value)
    if key == "adapter_versions":
        given = mapping(where, value)
        return {name: text(f"{where}.{name}", each) for name, each in given.items()}
    if key in {"store", "model", "weights_version", "weight_digests", "control"}:
        return text(where, value)
    if key in _CHOICES:
        return one_of(where, _CHOICES[key], value)
    if key in {"host_memory_gib", "idle_wait_s"}:
        return number(where, value)
    return integer(where, value)


def _check(where: str, settings: PluginSettings) -> None:
    if settings.host_memory_gib is not None and settings.host_pages is not None:
        raise ConfigError(f"{where}: give host_memory_gib or host_pages, and not both")
    if settings.host_pages is not None and settings.host_pages < 1:
        raise ConfigError(f"{where}: host_pages is {settings.host_pages}, must be 1 or more")
    if settings.host_memory_gib is not None and not 0 < settings.host_memory_gib < 1 << 20:
        raise ConfigError(
            f"{where}: host_memory_gib is {settings.host_memory_gib}, must be more than 0"
        )
    if settings.pipeline_depth not in (0, 1):
        raise ConfigError(f"{where}: pipeline_depth is {settings.pipeline_depth}, must be 0 or 1")
    if settings.metrics_port is not None and not 1 <= settings.metrics_port <= PORT_MAX:
        raise ConfigError(
            f"{where}: metrics_port is {settings.metrics_port}, must be 1 to {PORT_MAX}"
        )
    if not 0 < settings.idle_wait_s <= 1:
        raise ConfigError(
            f"{where}: idle_wait_s is {settings.idle_wait_s}, must be more than 0 and at most 1"
        )


def section(where: str, kind: type[Section], value: object) -> Section:
    """Return a dataclass of which a user has given some fields, each of the type that it has there.

    Raises `ConfigError` with the field that is wrong, also where the class itself refuses it.
    """
    given = mapping(where, value)
    types = {each.name: each.type for each in fields(cast("Any", kind))}
    require_known(where, given, set(types))
    values: dict[str, Any] = {"round_s": ROUND_S} if kind is Timeouts else {}
    for key, each in given.items():
        values[key] = _READERS.get(cast("Any", types[key]), integer)(f"{where}.{key}", each)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def mapping(where: str, value: object) -> Mapping[str, Any]:
    """Return a value that holds keys and values."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold keys and values, not {value!r}")
    return cast("Mapping[str, Any]", value)


def require_known(where: str, given: Iterable[str], known: set[str]) -> None:
    """Raise `ConfigError` for the first key that means nothing."""
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{where}: there is no key {key!r}; known: {', '.join(sorted(known))}"
            )


def one_of(where: str, choices: type[Choice], value: object) -> Choice:
    """Return one of several choices by its name."""
    try:
        return choices(cast("str", value))
    except ValueError:
        raise ConfigError(f"{where} is {value!r}; known: {', '.join(choices)}") from None


def text(where: str, value: object) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be text, not {value!r}")
    return value


def number(where: str, value: object) -> float:
    """Return a number, whole or not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} must be a number, not {value!r}")
    return float(value)


def integer(where: str, value: object) -> int:
    """Return a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be an integer, not {value!r}")
    return value


def truth(where: str, value: object) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, not {value!r}")
    return value


def _unshown(where: str, value: object) -> str:
    """Return a text, which may be empty; what is none is not shown, since it may be a secret."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text")
    return value


def _texts(where: str, value: object) -> tuple[str, ...]:
    """Return a list of texts."""
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list of texts, not {value!r}")
    return tuple(text(where, each) for each in cast("list[object]", value))


_READERS: Mapping[Any, Callable[[str, object], object]] = {
    StopRule: lambda where, value: one_of(where, StopRule, value),
    float: number,
    bool: truth,
    str: _unshown,
    tuple[str, ...]: _texts,
}
"""What reads a field of a section by its type; all others are whole numbers."""
