"""Canonical bytes for what an engine is configured with: equal in every process, rank and start.

What a value is worth here is its type and what it holds, never where it lies in memory: no address, no
order of a set or mapping, no text that a class makes up for people. What has no such bytes is refused
by the name of the field that holds it, so that no part of a configuration is left out unseen.
"""

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from pathlib import PurePath
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch

from ..errors import ConfigError

Json = str | int | bool | None | list["Json"]

LeftOut = Mapping[str, AbstractSet[str]]
"""By class, with its module: attributes that do not count, also in classes that are derived from it."""

DIGEST_CHARACTERS = 32
"""128 bits in hexadecimal: nobody chooses configurations so that they collide."""

_NOTHING_LEFT_OUT: LeftOut = {}


def canonical(value: object, where: str, left_out: LeftOut = _NOTHING_LEFT_OUT) -> Json:
    """Return what `value` is worth, as nested lists whose JSON is its canonical text.

    Raises `ConfigError` for a value without canonical bytes; `where` is how the message calls it.
    """
    return _Walk(left_out).of(value, where, ())


def digest(canonical_value: Json) -> str:
    """Return a digest of what `canonical` has returned."""
    return sha256(_text(canonical_value).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _is_scalar(value: object) -> bool:
    return isinstance(value, np.generic)


def _name(kind: type | FunctionType) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Walk:
    """Goes through one configuration. Every list begins with what kind of value it stands for."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def of(self, value: object, where: str, within: tuple[int, ...]) -> Json:
        """Return what a value is worth; `within` identifies the objects that hold it."""
        if isinstance(value, Enum):
            return ["enum", _name(type(value)), value.name]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return ["float", value.hex()]
        if isinstance(value, bytes | bytearray):
            return ["bytes", value.hex()]
        if isinstance(value, torch.dtype | torch.device | PurePath | Fraction | Decimal):
            return ["text", type(value).__name__, str(value)]
        if _is_scalar(value):
            return self._scalar(value, where, within)
        if isinstance(value, re.Pattern):
            return ["pattern", self.of(cast("Any", value).pattern, where, within), value.flags]
        if isinstance(value, type | FunctionType):
            return self._named(value, where)
        if id(value) in within:
            return ["again", within.index(id(value))]
        return self._composed(value, where, (*within, id(value)))

    def _scalar(self, value: Any, where: str, within: tuple[int, ...]) -> Json:
        return ["scalar", type(value).__name__, self.of(value.item(), where, within)]

    def _named(self, value: type | FunctionType, where: str) -> Json:
        if "<" in value.__qualname__:
            raise ConfigError(
                f"{where} is {_name(value)}, which has no name of its own to tell KV apart by; define"
                " it at the top level of a module"
            )
        return ["named", _name(value)]

    def _composed(self, value: object, where: str, within: tuple[int, ...]) -> Json:
        if isinstance(value, Mapping):
            pairs = [
                [self.of(key, where, within), self.of(each, f"{where}[{key!r}]", within)]
                for key, each in cast("Mapping[object, object]", value).items()
            ]
            return ["mapping", *sorted(cast("list[Json]", pairs), key=_text)]
        if isinstance(value, AbstractSet):
            members = [self.of(each, where, within) for each in cast("AbstractSet[object]", value)]
            return ["set", *sorted(members, key=_text)]
        if isinstance(value, Sequence):
            items = enumerate(cast("Sequence[object]", value))
            return ["list", *(self.of(each, f"{where}[{at}]", within) for at, each in items)]
        kind = type(value)
        left_out: set[str] = set()
        for base in kind.__mro__:
            left_out |= self._left_out.get(_name(base), frozenset())
        held: list[Json] = [
            [name, self.of(each, f"{where}.{name}", within)]
            for name, each in sorted(_state(value, where).items())
            if name not in left_out
        ]
        return ["object", _name(kind), *held]


def _state(value: object, where: str) -> dict[str, object]:
    """Return what an object holds by name, but for what its class has only cached."""
    kind = type(value)
    if is_dataclass(value):
        names = [each.name for each in fields(value)]
        state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        state |= getattr(value, "__dict__", {})
    else:
        state = _plain_state(value, where)
    return {name: each for name, each in state.items() if not _is_cached(kind, name)}


def _plain_state(value: object, where: str) -> dict[str, object]:
    """Return what pickle would write of an object, if that is all that there is to it."""
    kind = type(value)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        try:
            _, made, held, *_ = cast("tuple[Any, ...]", object.__reduce_ex__(value, 2))
        except TypeError:
            # It holds something beside its attributes.
            pass
        else:
            state: dict[str, object] = {"(made of)": made[1:]}
            for part in cast("tuple[object, ...]", held if isinstance(held, tuple) else (held,)):
                mapping = cast("dict[str, object]", part)
                state |= mapping if isinstance(part, dict) else {"(holds)": part}
            return state
    raise ConfigError(
        f"{where} is a {_name(kind)}, which has no canonical bytes to tell KV apart by; run the engine"
        " without it, or without the connector"
    )


def _is_cached(kind: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), cached_property) for base in kind.__mro__)
