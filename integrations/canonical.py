"""Canonical bytes of an engine's configuration: equal in every process, on every rank, at every start.

The canonical form of a value has the value's type and contents. It has no memory address, no order of a
set or mapping, and no text made for display. A value without a canonical form raises an error that
names its field, so that no part of a configuration is silently ignored.
"""

import json
import logging
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import FunctionType, MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from ..errors import ConfigError

Json = str | int | bool | None | list["Json"]

LeftOut = Mapping[str, AbstractSet[str]]
"""Names of attributes to leave out of the canonical form, by qualified class name. Derived classes
leave out the same attributes."""

DIGEST_CHARACTERS = 32
"""Number of hexadecimal characters of a digest. They have 128 bits, which suffice because no attacker
chooses engine configurations."""

_NOTHING_LEFT_OUT: LeftOut = {}

# Values match the sets below only by their exact type, because an instance of a derived class may
# hold more data.
_ITSELF = frozenset({type(None), bool, int, str})
_BYTES = frozenset({bytes, bytearray})
_TEXT = frozenset(
    {
        *(torch.dtype, torch.device, Fraction, Decimal),
        *(PurePosixPath, PureWindowsPath, PosixPath, WindowsPath),
    }
)
_MAPPINGS = frozenset({dict, MappingProxyType})
_SETS = frozenset({set, frozenset})
_SEQUENCES = frozenset({list, tuple, range})
_NUMBERS = frozenset({int, float})

_BUILT_IN: tuple[Any, ...] = (dict, list, tuple, str, bytes, int, float, set, frozenset)

_PLAIN: tuple[Any, ...] = (object, set, frozenset, torch.Size, OrderedDict, Counter, defaultdict)
"""Standard-library classes whose objects have no state except contents, attributes and, for a
defaultdict, the default factory."""

_PLAIN_REDUCTIONS = frozenset(each.__reduce__ for each in _PLAIN)
"""The `__reduce__` methods of the classes in `_PLAIN`; each returns the whole state of an object."""

_OUTSIDE = ("_fields", "default_factory")
"""Attributes that `_PLAIN` objects have outside their instance dict: the field names of a named tuple
and the default factory of a defaultdict."""

_NOT_HELD = frozenset({"__orig_class__"})
"""Names of attributes that are not part of an object's value. Python sets `__orig_class__` if an object
is created with type arguments, as in `OrderedDict[str, int]()`."""


def canonical(value: object, where: str, left_out: LeftOut = _NOTHING_LEFT_OUT) -> Json:
    """Return the canonical form of `value`: nested lists, whose JSON is the canonical text.

    Raises `ConfigError` if `value` has no canonical form; the message calls it `where`.
    """
    return _Walk(left_out).of(value, where, ())


def digest(canonical_value: Json) -> str:
    """Return the digest of a value that `canonical` returned."""
    return sha256(_text(canonical_value).encode()).hexdigest()[:DIGEST_CHARACTERS]


def log_parts(log: logging.Logger, parts: Iterable[tuple[str, Json]]) -> None:
    """Log a digest of each part of a configuration, so that differences between ranks can be found."""
    if log.isEnabledFor(logging.DEBUG):
        for place, found in parts:
            log.debug("%s counts as %s", place, digest(found))


def _text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _name(kind: type | FunctionType) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Walk:
    """Converts a configuration to nested lists; each list begins with the kind of its value."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def of(self, value: object, where: str, within: tuple[int, ...]) -> Json:
        """Return a value's canonical form; `within` has ids of containing objects, to detect cycles."""
        if isinstance(value, Enum):
            return ["enum", _name(type(value)), value.name]
        kind = type(value)
        if kind in _ITSELF:
            return cast("str | int | bool | None", value)
        if kind is float:
            return ["float", cast("float", value).hex()]
        if kind in _BYTES:
            return ["bytes", cast("bytes", value).hex()]
        if kind in _TEXT:
            return ["text", kind.__name__, str(value)]
        if isinstance(value, np.generic):
            return ["scalar", kind.__name__, self.of(cast("Any", value).item(), where, within)]
        if isinstance(value, re.Pattern):
            return ["pattern", self.of(cast("Any", value).pattern, where, within), value.flags]
        if isinstance(value, type | FunctionType):
            return self._named(value, where)
        if id(value) in within:
            return ["again", within.index(id(value))]
        return self._composed(value, where, (*within, id(value)))

    def _named(self, value: type | FunctionType, where: str) -> Json:
        if "<" in value.__qualname__:
            raise ConfigError(
                f"{where} is {_name(value)}, which has no importable name for page keys; define it"
                " at the top level of a module"
            )
        return ["named", _name(value)]

    def _composed(self, value: object, where: str, within: tuple[int, ...]) -> Json:
        kind = type(value)
        if kind in _MAPPINGS:
            return [
                "mapping",
                *self._pairs(cast("Any", value).items(), lambda key: f"{where}[{key!r}]", within),
            ]
        if kind in _SETS:
            members = [self.of(each, where, within) for each in cast("AbstractSet[object]", value)]
            return ["set", *sorted(members, key=_text)]
        if kind in _SEQUENCES:
            items = enumerate(cast("Sequence[object]", value))
            return ["list", *(self.of(each, f"{where}[{at}]", within) for at, each in items)]
        left_out: set[object] = {*_NOT_HELD}
        for base in kind.__mro__:
            left_out |= self._left_out.get(_name(base), frozenset())
        beside, attributes = _state(value, where)
        held: list[Json] = [[name, self.of(each, where, within)] for name, each in beside.items()]
        counted = [
            (name, each)
            for name, each in attributes.items()
            if name not in left_out and not _is_cached(kind, name)
        ]
        return [
            "object",
            _name(kind),
            *held,
            *self._pairs(counted, lambda name: f"{where}.{name}", within),
        ]

    def _pairs(
        self,
        pairs: Iterable[tuple[object, object]],
        called: Callable[[object], str],
        within: tuple[int, ...],
    ) -> list[Json]:
        """Return [key, value] pairs in canonical form, sorted by their canonical text.

        `called` is a function that returns a key's name for error messages.
        """
        found: list[Json] = [
            [self.of(key, called(key), within), self.of(each, called(key), within)]
            for key, each in pairs
        ]
        return sorted(found, key=_text)


def _state(value: object, where: str) -> tuple[dict[str, object], dict[object, object]]:
    """Return (contents, attributes) of an object, both as dicts by name.

    The contents are all state that is not in attributes, such as the items of a list.
    """
    kind: Any = type(value)
    beside: dict[str, object] = {}
    attributes: dict[object, object] = {}
    for base in _BUILT_IN:
        if issubclass(kind, base):
            beside["(contents)"] = _contents(value, base)
    for name in _OUTSIDE if beside else ():
        if hasattr(value, name):
            beside[f"({name})"] = getattr(value, name)
    if is_dataclass(value):
        state = object.__getstate__(value)
        names = [each.name for each in fields(value)]
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    elif beside:
        _require_plain(kind, where)
        state = value.__getstate__()
    else:
        beside["(made of)"], state = _reduced(value, where)
    if is_dataclass(value) or kind.__getstate__ is object.__getstate__:
        # `__getstate__` returns a dict of attributes or, for a class with slots, a pair of dicts: the
        # attributes (or None) and the slots.
        whole: Any = state
        for part in whole if isinstance(state, tuple) else (whole,):
            attributes |= part or {}
    elif isinstance(state, dict) and all(
        isinstance(name, str) and name.isidentifier()
        for name in cast("dict[object, object]", state)
    ):
        attributes |= cast("dict[object, object]", state)
    else:
        beside["(holds)"] = state
    return beside, attributes


def _contents(value: Any, base: Any) -> object:
    """Return a value's contents as the built-in type `base`, bypassing overridden methods."""
    if base in _SETS:
        return frozenset[object]().union(value)
    if base in _MAPPINGS:
        return cast("object", base.copy(value))
    return base.__pos__(value) if base in _NUMBERS else base.__getitem__(value, slice(None))


def _reduced(value: object, where: str) -> tuple[object, object]:
    """Return the constructor arguments and the state with which pickle would rebuild an object.

    Raises `ConfigError` if they might not describe the whole object.
    """
    _require_plain(type(value), where)
    try:
        _, made, state, *_ = cast("tuple[Any, ...]", object.__reduce_ex__(value, 2))
    except TypeError:
        # Refuse an object with data outside its attributes, because pickle could not rebuild it.
        raise _refused(type(value), where) from None
    return made[1:], state


def _require_plain(kind: Any, where: str) -> None:
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ not in _PLAIN_REDUCTIONS:
        raise _refused(kind, where)


def _refused(kind: type, where: str) -> ConfigError:
    return ConfigError(
        f"{where} is a {_name(kind)}, which has no canonical bytes for page keys; run the engine"
        " without this setting, or without the connector"
    )


def _is_cached(kind: type, name: object) -> bool:
    return any(
        isinstance(vars(base).get(cast("str", name)), cached_property) for base in kind.__mro__
    )
