"""Which engines share pages: all that compute the same KV, or only equally configured engines.

A page's key has an engine-neutral description of its KV (`kv_description.py`). Supported engines with
default settings compute the described KV, so they share pages. An engine's `key_exclusions.py` lists
settings that may have any value without an effect on sharing. Any other setting with a non-default
value adds to the key a digest of the engine's version and of all settings that can change KV. An
unknown setting therefore causes a miss, never wrong data.

vLLM's own `compute_hash` cannot serve as this digest, because it identifies compiled graphs. It omits
settings that change KV, and includes paths, the TP size and batch sizes.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from .canonical import Json, canonical, digest, log_parts
from .kv_description import KvDescription
from .releases import is_release


class Share(StrEnum):
    """Which engines share the pages of a model."""

    ALL = "all"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Names of the settings of one engine that do not prevent sharing, whatever their value."""

    operational: frozenset[str]
    """Settings that cannot change KV."""
    rounding: frozenset[str]
    """Settings that change at most the order of summation, and therefore only the rounding of KV."""


def names_of(*lists: Mapping[str, str]) -> frozenset[str]:
    """Return all setting names in the keys of `lists`; the values are reasons.

    A key has one or more names, separated by spaces.
    """
    return frozenset(name for reasons in lists for names in reasons for name in names.split())


def names_in_classes(classes: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    """Return all settings in `classes` as `Class.name`.

    `classes` maps a class name to a mapping whose keys name settings and whose values are reasons.
    """
    return frozenset(f"{kind}.{name}" for kind, each in classes.items() for name in names_of(each))


@dataclass(frozen=True, slots=True)
class Setting:
    """One configurable field of an engine."""

    name: str
    """The setting's name in `key_exclusions.py`."""
    place: str
    """Path of the setting in the engine's configuration, as named in messages."""
    value: object
    default: object
    """The engine's default value; `MISSING` if the setting has no default."""


@dataclass(frozen=True, slots=True)
class KeyedEngineSettings:
    """An engine's configuration apart from its model and weights."""

    engine: str
    version: str
    releases: Sequence[str]
    """Releases of the engine for which the default settings were verified."""
    settings: Sequence[Setting]
    package: str
    """Name of the engine's Python package. A dataclass of this package counts as several settings, one
    for each field."""
    exclusions: Exclusions
    resolved: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values that the engine fills in for its own defaults, by setting name; these values count as
    defaults, too."""

    def digest(self, *beside: Json) -> str:
        """Return a digest of the engine's version, its settings that can change KV, and further values.

        `beside` has the further values. Raises `ConfigError` for a value without canonical bytes.
        """
        counted = self._settings(self.exclusions.operational)
        found: list[Json] = [[each.place, canonical(each.value, each.place)] for each in counted]
        return digest([self.version, sorted(found, key=str), *beside])

    def set_otherwise(self) -> Iterator[str]:
        """Yield the path of each setting that prevents sharing pages with other engines.

        Also yields the engine's version if its release is not supported.
        """
        if not is_release(self.version, self.releases):
            yield f"version {self.version}"
        for each in self._settings(self.exclusions.operational | self.exclusions.rounding):
            defaults = [each.default, self.resolved.get(each.name, MISSING)]
            if not any(_is_worth(each, default) for default in defaults):
                yield each.place

    def log_parts(self, log: logging.Logger) -> None:
        """Log a digest of each setting that can change KV, to locate differences between ranks."""
        counted = self._settings(self.exclusions.operational)
        log_parts(log, ((each.place, canonical(each.value, each.place)) for each in counted))

    def _settings(self, left_out: frozenset[str]) -> Iterator[Setting]:
        return (found for each in self.settings for found in expanded(each, self.package, left_out))


def kv_name(
    weights: str,
    description: KvDescription,
    settings: KeyedEngineSettings,
    share: Share,
    log: logging.Logger,
) -> str:
    """Return the engine's part of every page key, and log which engines share pages."""
    settings.log_parts(log)
    if share is Share.ENGINE:
        log.info("pages are shared only with %s engines of equal configuration", settings.engine)
    elif otherwise := (*description.unproven, *settings.set_otherwise()):
        log.info(
            "pages are shared only with %s engines of equal configuration, because other engines may"
            " compute different KV for: %s",
            settings.engine,
            ", ".join(otherwise),
        )
    else:
        log.info(
            "pages are shared with every engine of the same model, weights, dtype and page size"
        )
        return f"{weights}/{description.digest}"
    return f"{weights}/{settings.engine} {settings.digest(description.digest)}"


def settings_in(config: object, where: str, default: object = None) -> list[Setting]:
    """Return the fields of the dataclass instance `config` as settings.

    Leaves out unset fields and fields with `init=False`. The default of each field comes from `default`
    if `default` has the same class; otherwise from the class.
    """
    kind: Any = type(config)
    known: Any = default if isinstance(default, kind) else None
    return [
        Setting(
            f"{kind.__qualname__}.{each.name}",
            f"{where}.{each.name}",
            getattr(config, each.name),
            getattr(known, each.name) if known else _declared(kind, each.name),
        )
        for each in fields(kind)
        if each.init and hasattr(config, each.name)
    ]


def expanded(setting: Setting, package: str, left_out: frozenset[str]) -> Iterator[Setting]:
    """Yield a setting or, if its value is a dataclass of `package`, the dataclass's fields as settings.

    If the default is not an object of this dataclass, also yield a setting named after the dataclass,
    to record that the configuration has such an object.
    """
    value, kind = setting.value, type(setting.value)
    if setting.name in left_out:
        return
    if not (is_dataclass(value) and kind.__module__.startswith(package)):
        yield setting
        return
    name = kind.__qualname__
    if not isinstance(setting.default, kind) and name not in left_out:
        yield Setting(name, setting.place, name, setting.default)
    for each in settings_in(value, setting.place, setting.default):
        yield from expanded(each, package, left_out)


def _is_worth(setting: Setting, default: object) -> bool:
    # Compare digests instead of values, because in Python 0 == False and 1 == True.
    worth = digest(canonical(setting.value, setting.place))
    return default is not MISSING and worth == digest(canonical(default, "a default"))


def _declared(kind: Any, name: str) -> object:
    # Get defaults from pydantic, because vLLM's configuration classes are pydantic dataclasses, for
    # which `dataclasses.fields` has no defaults.
    found = getattr(kind, "__pydantic_fields__", {}).get(name)
    if found is not None:
        return MISSING if found.is_required() else found.get_default(call_default_factory=True)
    for each in fields(kind):
        if each.name == name:
            return each.default if each.default_factory is MISSING else each.default_factory()
    return MISSING
