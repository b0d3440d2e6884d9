"""Which engines share pages: all that compute the same KV, or those that are configured alike.

The key of a page has a description of its KV that is no engine's own (`kv_description.py`). The
engines that the plug-ins are for compute what it says unless somebody sets them up otherwise. So an
engine whose settings are as it has them by default shares with every other such engine. The
`key_exclusions.py` of an engine lists, with reasons, the settings that may have any value. Any other
setting that is not as by default, whether it is known here or not, puts a digest into the key: of the
engine's name and version and of all its settings that are not operational. So an unknown setting is a
miss, never wrong data.

vLLM's own `compute_hash` is no such digest, because it tells compiled graphs apart. It leaves out how
weights are loaded, the class of the worker and other settings that change KV, and it includes paths,
the TP size and the sizes of batches.
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
    """With whom an engine shares the pages of its model."""

    ALL = "all"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Exclusions:
    """The settings of an engine that are in no key, or only in the keys of engines of its own kind."""

    operational: frozenset[str]
    """Settings that cannot change KV."""
    rounding: frozenset[str]
    """Settings that may change in which order sums are added up, as another TP size does."""


def names_of(*lists: Mapping[str, str]) -> frozenset[str]:
    """Return the names in lists of reasons, each of which stands for names with spaces between them."""
    return frozenset(name for reasons in lists for names in reasons for name in names.split())


def names_in_classes(classes: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    """Return the names in lists of reasons by class, as `Class.name`."""
    return frozenset(f"{kind}.{name}" for kind, each in classes.items() for name in names_of(each))


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that an engine can be configured with."""

    name: str
    """Its name in `key_exclusions.py`."""
    place: str
    """Its place in the configuration, for messages."""
    value: object
    default: object
    """What the engine has if nobody says anything; `MISSING` for what is never a default."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is configured with beside its model and its weights."""

    engine: str
    version: str
    releases: Sequence[str]
    """Those of which the defaults are known."""
    settings: Sequence[Setting]
    package: str
    """The package of the engine whose dataclasses are looked into."""
    exclusions: Exclusions
    resolved: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values by name that the engine itself puts in place of a default, and that count as one, too."""

    def digest(self, *beside: Json) -> str:
        """Return a digest of all settings that are not operational, and of what is `beside` them.

        Raises `ConfigError` for a value without canonical bytes.
        """
        counted = self._settings(self.exclusions.operational)
        found: list[Json] = [[each.place, canonical(each.value, each.place)] for each in counted]
        return digest([self.version, sorted(found, key=str), *beside])

    def set_otherwise(self) -> Iterator[str]:
        """Yield what keeps the engine from sharing with others: settings, and an unknown release."""
        if not is_release(self.version, self.releases):
            yield f"version {self.version}"
        for each in self._settings(self.exclusions.operational | self.exclusions.rounding):
            defaults = [each.default, self.resolved.get(each.name, MISSING)]
            if not any(_is_worth(each, default) for default in defaults):
                yield each.place

    def log_parts(self, log: logging.Logger) -> None:
        """Log a digest of each setting that counts, so that ranks that differ see in what."""
        counted = self._settings(self.exclusions.operational)
        log_parts(log, ((each.place, canonical(each.value, each.place)) for each in counted))

    def _settings(self, left_out: frozenset[str]) -> Iterator[Setting]:
        return (
            found for each in self.settings for found in looked_into(each, self.package, left_out)
        )


def kv_name(
    weights: str,
    description: KvDescription,
    settings: EngineSettings,
    share: Share,
    log: logging.Logger,
) -> str:
    """Return what the key of every page has for an engine's KV, and say in a line what that means."""
    settings.log_parts(log)
    if share is Share.ENGINE:
        log.info("pages are shared with %s engines that are configured alike", settings.engine)
    elif otherwise := (*description.unproven, *settings.set_otherwise()):
        log.info(
            "pages are shared with %s engines that are configured alike, and with no other engine:"
            " others may compute another KV because of %s",
            settings.engine,
            ", ".join(otherwise),
        )
    else:
        log.info(
            "pages are shared with every engine of the same model, weights, type and page size"
        )
        return f"{weights}/{description.digest}"
    return f"{weights}/{settings.engine} {settings.digest(description.digest)}"


def settings_in(config: object, where: str, default: object = None) -> list[Setting]:
    """Return what can be set of a dataclass; what follows from that, and is not set, is left out.

    `default` is the one that the engine has by default; if it is of another class, defaults are those
    that the class declares.
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


def looked_into(setting: Setting, package: str, left_out: frozenset[str]) -> Iterator[Setting]:
    """Yield a setting, or those that it consists of if it is a dataclass of `package`.

    Where there is none by default, that there is one is a setting too, under the name of the class.
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
        yield from looked_into(each, package, left_out)


def _is_worth(setting: Setting, default: object) -> bool:
    # By digests: for `==`, False would be worth 0, and True 1.
    worth = digest(canonical(setting.value, setting.place))
    return default is not MISSING and worth == digest(canonical(default, "a default"))


def _declared(kind: Any, name: str) -> object:
    # vLLM's classes are pydantic's, of which the fields of a dataclass do not tell defaults.
    found = getattr(kind, "__pydantic_fields__", {}).get(name)
    if found is not None:
        return MISSING if found.is_required() else found.get_default(call_default_factory=True)
    for each in fields(kind):
        if each.name == name:
            return each.default if each.default_factory is MISSING else each.default_factory()
    return MISSING
