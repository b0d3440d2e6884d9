"""Base classes for settings: each field is declared once with its bounds and checked on construction.

A field's annotation defines its check: `Annotated[int, Meta(ge=1)]`. `read_settings` parses user input
from JSON or a URI. A wrong value raises a one-line `ConfigError` with the field's path, the value, and
the expected value.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import index
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from ..errors import ConfigError

TIMEOUT_S_MAX: Final = 1e6
"""Upper bound of every timeout in seconds: about eleven days."""

Text = Annotated[str, Meta(min_length=1)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=TIMEOUT_S_MAX)]

SettingsT = TypeVar("SettingsT", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings: frozen, and checked against the annotations on construction."""

    def __post_init__(self) -> None:
        for name, value in _checked(self, self._whose()):
            object.__setattr__(self, name, value)

    def _whose(self) -> str:
        """Return a text with which every error message begins; subclasses may override this method."""
        return ""


class TaggedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that are one alternative of a tagged union; checked like `Settings`."""

    def __post_init__(self) -> None:
        for name, value in _checked(self, self._whose()):
            msgspec.structs.force_setattr(self, name, value)

    def _whose(self) -> str:
        """Return a text with which every error message begins, as in `Settings`."""
        return ""


def read_settings(
    kind: type[SettingsT], given: object, where: str, *, strict: bool = True
) -> SettingsT:
    """Build settings from the values that a user has given by name; `where` names their source.

    With `strict=False`, numbers and flags may be written as text, as in a URI.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {shown(given)}, must hold keys and values")
    try:
        return _read(kind, cast("Mapping[str, object]", given), "", strict=strict)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def part_of(settings: Settings, kind: type[Settings]) -> dict[str, Any]:
    """Return, by name, the values of those fields of `settings` that the base class `kind` has."""
    return {each.name: getattr(settings, each.name) for each in fields(kind)}


def _read(
    kind: type[SettingsT], given: Mapping[str, object], path: str, *, strict: bool
) -> SettingsT:
    known, place = _kinds(kind), path and f"{path[:-1]}: "
    for name in given:
        if name not in known:
            listed = ", ".join(sorted(known))
            what = "key" if strict else "option"
            raise ConfigError(f"{place}there is no {what} {name!r}; known: {listed or 'none'}")
    for each in fields(kind):
        if each.default is each.default_factory is MISSING and each.name not in given:
            raise ConfigError(f"{path}{each.name} is missing; give it")
    values: dict[str, Any] = {
        name: _converted(kind, name, value, known[name], path, strict=strict)
        for name, value in given.items()
    }
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


def _checked(settings: Settings | TaggedSettings, whose: str) -> Iterator[tuple[str, object]]:
    """Yield each annotated field's name and converted value; every error text begins with `whose`."""
    kind = type(settings)
    for name, hint in _kinds(kind).items():
        yield name, _converted(kind, name, getattr(settings, name), hint, whose)


def _kinds(kind: type[Settings | TaggedSettings]) -> dict[str, Any]:
    return _hints(cast("Any", kind))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    if issubclass(kind, TaggedSettings):
        return {name: hints[name] for name in kind.__struct_fields__}
    return {each.name: hints[each.name] for each in fields(kind)}


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return a union's member types, or the type itself if it is no union, without `Annotated`."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(each for one in get_args(kind) for each in _choices(one))
    return (get_args(kind)[0] if get_origin(kind) is Annotated else kind,)


def _settings_of(kind: Any) -> tuple[type[Settings], bool] | None:
    """Return a field's settings class, and whether the field holds a tuple of such settings.

    Returns None for a field that holds no settings.
    """
    for each in _choices(kind):
        many = get_origin(each) is tuple
        inner = get_args(each)[0] if many else each
        if isinstance(inner, type) and issubclass(inner, Settings):
            return inner, many
    return None


def _values(kind: Any) -> tuple[object, ...]:
    """Return the values of an enumeration or a literal type; an empty tuple for any other type."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(each.value for each in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _records(kind: Any) -> Iterator[str]:
    """Yield the class names of the tagged settings and plain dataclasses that a field accepts."""
    if is_dataclass(kind) and not issubclass(cast("type", kind), Settings):
        yield cast("type", kind).__name__
    elif isinstance(kind, type) and issubclass(kind, TaggedSettings):
        yield kind.__name__
    for each in get_args(kind):
        yield from _records(each)


def _converted(
    owner: type[Settings | TaggedSettings],
    name: str,
    value: object,
    kind: Any,
    path: str = "",
    *,
    strict: bool = True,
) -> object:
    """Return a value converted to its field's type; raise `ConfigError` if the value does not fit."""
    given = value
    if not isinstance(value, bool | Enum):
        # Accept numpy and torch scalars. Leave other arrays unchanged.
        with suppress(TypeError, RuntimeError):
            value = (float if isinstance(value, float) else index)(cast("Any", value))
    inner, many = _settings_of(kind) or (None, False)

    def read(part: object) -> object:
        if inner is None or isinstance(part, str):
            return part
        if not isinstance(part, Mapping):
            # msgspec would accept any indexable object, such as a range, as a mapping. Replace such an
            # object by one that msgspec rejects.
            return part if part is None or isinstance(part, inner) else object()
        return _read(inner, cast("Mapping[str, object]", part), f"{path}{name}.", strict=strict)

    if not many:
        value = read(value)
    elif isinstance(value, list | tuple):
        value = tuple(map(read, cast("Sequence[object]", value)))
    try:
        if isinstance(value, str):
            # Accept surrogate escapes, which file names may contain.
            value.encode(errors="surrogateescape")
        return msgspec.convert(value, kind, strict=strict)
    except (msgspec.ValidationError, AttributeError, UnicodeEncodeError) as error:
        # For an array in place of a mapping, msgspec raises `AttributeError`.
        hidden = issubclass(owner, Settings) and not next(
            each.repr for each in fields(owner) if each.name == name
        )
        value_text = "" if hidden else f" is {shown(given)},"
        raise ConfigError(f"{path}{name}{value_text} {_remedy(str(error), kind)}") from None


def shown(value: object) -> str:
    """Return a value as text for a message; omit lists, maps and URIs, which may contain secrets."""
    if isinstance(value, str) and "://" in value:
        return "a URI"
    if value is None or isinstance(value, str | int | float | bool):
        return f"{value!r:.100}"
    return f"a {type(value).__name__}"


_WORDS: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bytes": "bytes",
    "bool": "true or false",
    "array": "a list",
    "object": "keys and values",
    "null": "null",
    ">=": "at least",
    ">": "more than",
    "<=": "at most",
    "<": "less than",
}


def _remedy(message: str, kind: Any) -> str:
    """Translate msgspec's error for a field into the expected value, such as "must be at least 1"."""
    reason, _, at = message.partition(" - at `$")
    values = [str(each) for one in _choices(kind) for each in _values(one)]
    if values:
        return f"must be one of {', '.join(values)}"
    found = re.fullmatch(
        r"Expected `([a-z |]+)`(?:, got `.*`| ([<>=]+) (.+)| of length >= 1)", reason
    )
    if found is None:
        return f"which is refused: {reason}"
    types, sign, bound = found.groups()
    if sign is not None:
        wanted = f"{_WORDS[sign]} {float(bound):.15g}"
    elif ", got" in reason:
        words = {**_WORDS, "object": " or ".join(_records(kind)) or _WORDS["object"]}
        wanted = " or ".join(words[each] for each in types.split(" | "))
    else:
        wanted = "non-empty text"
    return f"must have {wanted} in each place" if at else f"must be {wanted}"
